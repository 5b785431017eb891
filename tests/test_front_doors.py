"""Every way into sentence-transformers' training leads through the loss.

For each of them: the loss falls, the encoder's parameters move, and what is saved loads in a process that
cannot import this package and gives the same vectors. Where the library itself saves a model that still has
its head, in ``fit(output_path=)`` and in checkpoints, stripping that folder closes the leak.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import falls, make_sentences, record_losses
from datasets import Dataset, DatasetDict, IterableDataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.readers import InputExample
from torch.utils.data import DataLoader

from st_gsinfonce.collator import SimCSEDataCollator
from st_gsinfonce.encoder import build_encoder, has_head, save_encoder, strip_head
from st_gsinfonce.losses import GSInfoNCELoss

STEPS = 14
TEXTS = make_sentences(64)
DATASET = Dataset.from_dict({"text": TEXTS})


@pytest.fixture
def model(tiny_bert: Path) -> SentenceTransformer:
    """A tiny encoder that learns within a dozen steps, head included."""
    return build_encoder(tiny_bert, pooling="mean", seed=0, device="cpu")


@pytest.fixture
def check_saved(
    encode_elsewhere: Callable, tmp_path: Path
) -> Callable[[SentenceTransformer], None]:
    """Return a function that saves an encoder and compares its vectors with those made elsewhere."""

    def check(model: SentenceTransformer) -> None:
        before = model.encode(TEXTS[:8], convert_to_tensor=True)
        folder = save_encoder(model, tmp_path / "encoder")
        assert torch.equal(encode_elsewhere(folder, TEXTS[:8]), before.cpu())

    return check


def stream() -> IterableDataset:
    def rows() -> Any:
        for _ in range(8):
            yield from ({"text": text} for text in TEXTS)

    return IterableDataset.from_generator(rows, features=DATASET.features)


@pytest.mark.parametrize(
    "dataset, collate",
    [
        pytest.param(lambda: DATASET, False, id="single column"),
        pytest.param(lambda: DATASET, True, id="collator"),
        pytest.param(stream, False, id="iterable"),
        pytest.param(stream, True, id="iterable with collator"),
    ],
)
def test_the_trainer(
    model: SentenceTransformer,
    train: Callable,
    check_saved: Callable,
    dataset: Callable[[], Any],
    collate: bool,
) -> None:
    collator = SimCSEDataCollator(model.preprocess) if collate else None
    losses = train(
        model, GSInfoNCELoss(model, seed=0), dataset(), data_collator=collator, max_steps=STEPS
    )
    assert len(losses) == STEPS
    assert falls(losses)
    check_saved(model)


@pytest.mark.parametrize("collate", [False, True])
def test_the_trainer_with_several_datasets_and_losses(
    model: SentenceTransformer, train: Callable, check_saved: Callable, collate: bool
) -> None:
    collator = SimCSEDataCollator(model.preprocess) if collate else None
    datasets = DatasetDict({"first": DATASET, "second": DATASET.rename_column("text", "sentence")})
    losses = {
        "first": GSInfoNCELoss(model, seed=0),
        "second": GSInfoNCELoss(model, noise="expected", virtual_cosine=0.55),
    }
    each = {name: record_losses(loss) for name, loss in losses.items()}
    train(
        model,
        losses,
        datasets,
        data_collator=collator,
        max_steps=2 * STEPS,
        multi_dataset_batch_sampler="round_robin",
        num_train_epochs=4,
    )
    assert all(falls(values) for values in each.values())
    check_saved(model)


@pytest.mark.parametrize("method", ["fit", "old_fit"])
def test_fit(
    model: SentenceTransformer,
    check_saved: Callable,
    encode_elsewhere: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)  # fit leaves its checkpoints folder where it is called
    loss = GSInfoNCELoss(model, seed=0)
    losses = record_losses(loss)
    before = [parameter.detach().clone() for parameter in model[0].parameters()]
    examples = [InputExample(texts=[text]) for text in TEXTS]
    output = tmp_path / "output"
    getattr(model, method)(
        train_objectives=[(DataLoader(examples, batch_size=16, shuffle=True), loss)],
        epochs=4,
        warmup_steps=0,  # the default, 10,000 steps, would not leave the ground
        scheduler="constantlr",
        optimizer_params={"lr": 3e-3},
        output_path=str(output),
        show_progress_bar=False,
    )
    assert len(losses) == 16
    assert falls(losses)
    parameters = model[0].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    check_output(model, output, encode_elsewhere)
    check_saved(model)


def check_output(model: SentenceTransformer, folder: Path, encode_elsewhere: Callable) -> None:
    """A folder that the library wrote holds the head, until it is stripped."""
    assert has_head(folder)
    with pytest.raises(RuntimeError, match="trust_remote_code"):
        encode_elsewhere(folder, TEXTS[:8])
    vectors = encode_elsewhere(strip_head(folder), TEXTS[:8])
    assert torch.equal(vectors, model.encode(TEXTS[:8], convert_to_tensor=True).cpu())


def test_a_checkpoint_of_the_trainer(
    model: SentenceTransformer, train: Callable, encode_elsewhere: Callable, tmp_path: Path
) -> None:
    train(
        model,
        GSInfoNCELoss(model, seed=0),
        DATASET,
        max_steps=3,
        save_strategy="steps",
        save_steps=3,
        output_dir=str(tmp_path),
    )
    check_output(model, tmp_path / "checkpoint-3", encode_elsewhere)
