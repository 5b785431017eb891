"""The collator that makes two columns of one.

Its invariants:

- The text column becomes anchor and positive: equal tensors, no shared memory, tokenized once, and nothing
  of the column is left behind.
- Prompts, labels and the dataset's name go where sentence-transformers' own collator puts them.
- With it a stock loss on pairs is unsupervised SimCSE.
- A batch that has not exactly one text column, or a text that is no string, is an error that says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import falls, make_sentences
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor

from st_gsinfonce.collator import SimCSEDataCollator

MakeEncoder = Callable[..., SentenceTransformer]
TEXTS = ["the cat sees the dog", "the small red bird follows the old river", "the road"]


def rows(column: str = "text", **others: Any) -> list[dict[str, Any]]:
    return [{**others, column: text} for text in TEXTS]


def columns(batch: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}_"
    return {k.removeprefix(prefix): v for k, v in batch.items() if k.startswith(prefix)}


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_one_column_becomes_two_equal_ones(make_encoder: MakeEncoder, padding_side: str) -> None:
    model = make_encoder()
    model.tokenizer.padding_side = padding_side
    tokenized: list[str] = []

    def preprocess(inputs: list[str], **kwargs: Any) -> dict[str, Any]:
        tokenized.extend(inputs)
        return model.preprocess(inputs, **kwargs)

    batch = SimCSEDataCollator(preprocess)(rows())
    anchor, positive = columns(batch, "anchor"), columns(batch, "positive")
    assert tokenized == TEXTS
    assert len(batch) == len(anchor) + len(positive)  # nothing else
    expected = model.preprocess(TEXTS)
    assert anchor.keys() == positive.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(anchor[key], value) and torch.equal(positive[key], value)
            assert anchor[key].data_ptr() != positive[key].data_ptr()
        else:
            assert anchor[key] == positive[key] == value
    padded_first = anchor["attention_mask"][-1, 0] == 0
    assert padded_first == (padding_side == "left")


@pytest.mark.parametrize(
    "column", ["text", "anchor", "positive", "dataset", "input", "a", "my_text"]
)
def test_the_name_of_the_column_does_not_matter(make_encoder: MakeEncoder, column: str) -> None:
    collator = SimCSEDataCollator(make_encoder().preprocess)
    batch = collator(rows(column, dataset_name="mine", label=1))
    named = SimCSEDataCollator(make_encoder().preprocess)(rows(dataset_name="mine", label=1))
    assert batch.keys() == named.keys()
    assert batch["dataset_name"] == "mine"
    assert batch["label"].tolist() == [1, 1, 1]
    assert torch.equal(batch["anchor_input_ids"], named["anchor_input_ids"])


@pytest.mark.parametrize(
    "prompts, dataset_name",
    [
        ("the cat ", None),
        ({"text": "the cat "}, None),
        ({"mine": "the cat "}, "mine"),
        ({"mine": {"text": "the cat "}}, "mine"),
        ({"other": "the dog "}, None),
    ],
)
def test_prompts_are_given_as_to_the_stock_collator(
    make_encoder: MakeEncoder, prompts: Any, dataset_name: str | None
) -> None:
    model = make_encoder()
    model.set_pooling_include_prompt(False)
    batch = rows(**({"dataset_name": dataset_name} if dataset_name else {}))
    ours = SimCSEDataCollator(model.preprocess, prompts=prompts)(batch)
    stock = SentenceTransformerDataCollator(model.preprocess, prompts=prompts)(batch)
    expected = columns(stock, "text")
    prompted = "other" not in prompts
    assert ("prompt_length" in expected) == prompted
    assert expected["input_ids"].shape[1] == 10 + 2 * prompted
    for name in ("anchor", "positive"):
        view = columns(ours, name)
        assert view.keys() == expected.keys()
        assert torch.equal(view["input_ids"], expected["input_ids"])
        assert view.get("prompt_length") == expected.get("prompt_length")


def test_a_stock_loss_trains_with_it(make_encoder: MakeEncoder, train: Callable) -> None:
    model = make_encoder("mean")
    losses = train(
        model,
        MultipleNegativesRankingLoss(model),
        Dataset.from_dict({"text": make_sentences(64)}),
        data_collator=SimCSEDataCollator(model.preprocess),
        max_steps=12,
    )
    assert falls(losses)


def test_no_rows_make_no_batch(make_encoder: MakeEncoder) -> None:
    assert SimCSEDataCollator(make_encoder().preprocess)([]) == {}


@pytest.mark.parametrize(
    "batch, message",
    [
        (rows(other="a"), r"exactly one text column.*\['other', 'text'\]"),
        (rows("label"), r"columns \['label'\], of which 'label' is taken for labels.*renamed"),
        (rows("score", dataset_name="mine"), "'score' is taken for labels"),
        (rows(label=1, score=2), "'label' is taken for labels"),  # one label column is taken
        ([{"dataset_name": "mine"}], "exactly one text column"),
    ],
)
def test_a_batch_without_exactly_one_text_column_is_an_error(
    make_encoder: MakeEncoder, batch: list[dict[str, Any]], message: str
) -> None:
    remedy = 'keep one with dataset.select_columns("text"), renamed where its name is a label\'s'
    with pytest.raises(ValueError, match=message) as caught:
        SimCSEDataCollator(make_encoder().preprocess)(batch)
    assert str(caught.value).endswith(f": {remedy}")


@pytest.mark.parametrize("value", [None, math.nan, 3, b"bytes", ["a", "list"]])
@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_text_that_is_no_string_is_named(
    make_encoder: MakeEncoder, value: Any, position: int
) -> None:
    batch = rows()
    batch[position - 1]["text"] = value
    with pytest.raises(TypeError, match=f"'text': text {position} of the batch is ") as caught:
        SimCSEDataCollator(make_encoder().preprocess)(batch)
    assert str(caught.value).endswith(
        f"{value!r}, not a string; load_sentences drops such rows and says which"
    )
