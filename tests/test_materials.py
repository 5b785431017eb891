"""What a grid runs on.

- Seeds and devices are read as they were meant, or refused.
- Data and weights are known by content: where they lie and what they are called does not matter.
- The embedded corpus is scored by retrieval, other corpora on STS.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_gsinfonce import materials
from st_gsinfonce.materials import (
    GridOptions,
    Materials,
    docs_evaluator,
    load_materials,
    parse_devices,
    parse_seeds,
    setting_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*has .* pairs:UserWarning")  # a made-up STS set


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("5,0-1", [5, 0, 1]), (" 7 , 9", [7, 9])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "0,0", "0-2,1", "3-1", "1.5", "0-99999999999", "4294967296"]
)
def test_what_are_no_seeds(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds must be"):
        parse_seeds(text)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parse_devices("auto") == [] and parse_devices("cpu, cpu") == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="'cuda:0' is none of cpu"):
        parse_devices("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse_devices("auto") == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_devices("auto") == parse_devices("cuda:0,cuda:1") == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match="of one kind"):
        parse_devices("cuda:0,cpu")


def test_options_that_do_not_go_together(corpus_of_70: Path) -> None:
    with pytest.raises(ValueError, match="nothing to score on"):
        GridOptions(corpus=str(corpus_of_70))
    with pytest.raises(ValueError, match="needs --sts-data"):
        GridOptions(select="best")
    with pytest.raises(ValueError, match="--select must be"):
        GridOptions(select="last")
    for name in ("batch_size", "eval_steps", "max_sentences", "max_steps", "epochs"):
        with pytest.raises(ValueError, match=f"--{name} must be .*, got 0"):
            GridOptions(**{name: 0})
    with pytest.raises(ValueError, match="--max_steps must be -1 or"):
        GridOptions(max_steps=-5)
    for name in ("", "../grid", "a/b", ".."):
        with pytest.raises(ValueError, match="--name must be a file's name"):
            GridOptions(name=name)
    mini = GridOptions(mini=True, seeds="4-9")
    assert mini.name == "grid-mini"
    assert (mini.max_steps, mini.max_sentences, mini.seeds) == (3, 512, "4,5")


def test_the_embedded_corpus_is_scored_by_retrieval(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Corpus:
        train_sentences = tuple(make_sentences(40))
        heldout_pairs = tuple(zip(make_sentences(8, 1), make_sentences(8, 2), strict=True))

    monkeypatch.setattr(materials, "embedded_corpus", Corpus)
    options = GridOptions(model=str(tiny_bert), max_sentences=20, precision="fp32")
    loaded = load_materials(options)
    assert loaded.sentences == make_sentences(40)[:20] and loaded.dev is None
    setting = setting_of(options, loaded)
    assert [source.name for source in setting.evaluation] == ["docs"]
    model = SentenceTransformer(str(tiny_bert), device="cpu")
    scores = loaded.score(model)
    assert set(scores) == {"docs MRR@10", "docs recall@1"}
    assert 0 <= scores["docs recall@1"] <= scores["docs MRR@10"] <= 100
    texts = make_sentences(5)
    found = docs_evaluator(zip(texts, texts, strict=True))(model)
    assert found["docs_cosine_mrr@10"] == found["docs_cosine_recall@1"] == 1  # itself is nearest


def test_a_missing_mteb_is_found_before_the_first_run(
    grid_options: GridOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(ImportError, match=r"st_gsinfonce\[eval\]"):
        load_materials(grid_options)


def test_an_encoder_s_own_pooling_is_part_of_it(
    grid_options: GridOptions, tiny_bert: Path, tmp_path: Path
) -> None:
    model = SentenceTransformer(str(tiny_bert), device="cpu")
    digests = {}
    for mode in ("cls", "mean"):
        width = model.get_embedding_dimension()
        other = SentenceTransformer(modules=[model[0], Pooling(width, mode)], device="cpu")
        other.save(str(tmp_path / mode))
        for pooling in ("model", "cls"):
            options = replace(grid_options, model=str(tmp_path / mode), pooling=pooling)
            digests[mode, pooling] = load_materials(options).encoder.sha256
    assert digests["cls", "cls"] == digests["mean", "cls"]  # which replaces it
    assert len(set(digests.values())) == 3


def test_the_data_are_known_by_content(
    grid_options: GridOptions, loaded: Materials, tmp_path: Path
) -> None:
    text = Path(grid_options.corpus).read_text(encoding="utf-8")
    for name, content, same in (("same.txt", text, True), ("more.txt", text + "\nthe cat", False)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        other = load_materials(replace(grid_options, corpus=str(tmp_path / name)))
        assert (other.corpus.sha256 == loaded.corpus.sha256) == same
        assert other.encoder == loaded.encoder and other.evaluation == loaded.evaluation
