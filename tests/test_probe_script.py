"""The script that probes the batch size, run as a user runs it.

- What it prints is what it saves, and that is what the probe and the geometry give for the same encoder.
- Duplicates are dropped and counted; batch sizes larger than the corpus are left out, with a warning.
- Nothing is written over, or lost for want of matplotlib.
- What is wrong ends with one line that says what, before the work.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import RunExample

from st_gsinfonce import build_encoder
from st_gsinfonce.analysis import BATCH_SIZES, Geometry, probe_false_negatives
from st_gsinfonce.figure_data import ProbeData, read_figure_data


@pytest.fixture
def run(run_example: RunExample) -> RunExample:
    return partial(run_example, "probe_batch_size.py")


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Path:
    """64 sentences and one of them again."""
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([*sentences, sentences[0]]), encoding="utf-8")
    return path


@pytest.fixture
def flags(tiny_bert: Path, corpus: Path) -> list[str]:
    return f"--model {tiny_bert} --corpus {corpus} --repeats 5 --batch_sizes 8 16 64 --output out/p".split()


def test_the_defaults(run: RunExample) -> None:
    options = run(name="module")["ProbeOptions"]()
    assert (options.model, options.corpus, options.pooling) == ("embedded", "embedded", "model")
    assert options.batch_sizes == list(BATCH_SIZES) and options.threshold == 0.9
    assert (options.top_k, options.repeats, options.output) == (4, 100, "runs/probe")


def test_what_is_printed_is_saved_and_right(
    run: RunExample,
    flags: list[str],
    tiny_bert: Path,
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    run(*flags, "--pooling", "cls", "--threshold", "0.5", "--seed", "3")
    printed = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "p.json",
        "p.png",
        "p.svg",
    ]
    model = build_encoder(tiny_bert, pooling="cls", head=False)
    expected = probe_false_negatives(model, sentences, [8, 16, 64], 4, 5, 3)
    data = read_figure_data(tmp_path / "out" / "p.json")
    assert isinstance(data, ProbeData) and data.probe == expected and data.threshold == 0.5
    record = json.loads((tmp_path / "out" / "p.json").read_text(encoding="utf-8"))
    assert record["verdict"] == expected.verdict(0.5) and record["verdict"] in printed
    assert "probe_batch_size.py --model" in record["run"]["command"]
    assert "torch" in record["run"]["versions"] and "cpu" in record["run"]["hardware"]
    assert record["corpus"] == "corpus.txt: kept 64 of 65: 1 duplicate (first: row 65)"
    assert record["corpus"] in printed and "pooling cls, 32 tokens" in record["encoder"]
    for point in expected.points:
        row = (
            f"{point.batch_size:>8}{point.mean:>10.3f}{point.sd:>8.3f}{point.gaussian_mean:>10.3f}"
        )
        assert row in printed
    space = Geometry.of(model.encode(sentences))
    assert f"of {space.dim} dimensions" in printed
    for value in (space.anisotropy, space.uniformity, space.effective_rank):
        assert f"{value:.3f}" in printed
    worst = expected.points[-1].pairs[0]
    assert f"{worst.cosine:.3f}, among the top 4 of {worst.batches} batches" in printed
    assert f"- {worst.first}\n" in printed and f"- {worst.second}\n" in printed
    assert data.title == f"{tiny_bert.name}; 64 sentences of corpus.txt"
    assert "out/p.png, out/p.svg, out/p.json" in printed


def test_the_model_s_own_pooling_is_kept(
    run: RunExample, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*flags, "--max_sentences", "20", "--batch_sizes", "8", "--repeats", "1")
    printed = capsys.readouterr().out
    assert "pooling mean, 32 tokens" in printed and "kept 20 of 20" in printed
    assert "nan" not in printed  # of one batch there is no deviation


def test_a_corpus_smaller_than_a_batch(
    run: RunExample, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*flags, "--batch_sizes", "4096", "65", "64")
    printed = capsys.readouterr().out
    assert (
        "Note: the batch sizes 65, 4096 are left out: there are 64 distinct sentences." in printed
    )
    data = read_figure_data(tmp_path / "out" / "p.json")
    assert isinstance(data, ProbeData) and [p.batch_size for p in data.probe.points] == [64]
    with pytest.raises(SystemExit, match="error: batch_sizes must hold one of at most 64"):
        run(*flags, "--batch_sizes", "128", "--overwrite")


def test_nothing_is_written_over(run: RunExample, flags: list[str], tmp_path: Path) -> None:
    run(*flags)
    saved = (tmp_path / "out" / "p.json").read_bytes()
    with pytest.raises(SystemExit, match=r"error: --output: out/p.png exists .*--overwrite"):
        run(*flags, "--seed", "1")
    assert (tmp_path / "out" / "p.json").read_bytes() == saved
    run(*flags, "--seed", "1", "--overwrite")
    assert (tmp_path / "out" / "p.json").read_bytes() != saved


def test_without_matplotlib_the_numbers_are_saved(
    run: RunExample,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(*flags)
    assert "without the figure: figures need matplotlib: pip install" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["p.json"]
    assert isinstance(read_figure_data(tmp_path / "out" / "p.json"), ProbeData)


def test_the_smoke_run(run: RunExample, flags: list[str], tmp_path: Path) -> None:
    run(*flags, "--mini", "--batch_sizes", "32", "4096")
    data = read_figure_data(tmp_path / "out" / "p.json")
    assert isinstance(data, ProbeData)
    assert data.probe.repeats == 3 and [p.batch_size for p in data.probe.points] == [32]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--threshold", "90"], "--threshold is a cosine, from -1 to 1, got 90"),
        (["--corpus", "absent.txt"], "absent.txt"),
        (["--model", "no/such-model"], "no/such-model"),
        (["--pooling", "first"], "pooling must be"),
        (["--batch_sizes", "2"], "batch_sizes must be integers of at least 4"),
        (["--top_k", "0"], "top_k must be an integer of at least 1"),
        (["--output", "out/"], "a figure needs a file's name"),
        (["--max_seq_length", "1"], "max_seq_length must be"),
    ],
)
def test_what_is_wrong_ends_with_a_reason(
    run: RunExample, flags: list[str], extra: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run(*flags, *extra)
    assert not (tmp_path / "out").exists()


def test_a_private_corpus_is_not_saved(
    run: RunExample,
    flags: list[str],
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(*flags, "--private")
    printed = capsys.readouterr().out
    assert any(f"- {sentence}\n" in printed for sentence in sentences)
    saved = (tmp_path / "out" / "p.json").read_text(encoding="utf-8")
    assert '"values"' in saved and not any(sentence in saved for sentence in sentences)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--top_k", "0"], "top_k must be an integer of at least 1"),
        (["--batch_sizes", "1"], "batch_sizes must be"),
        (["--max_sentences", "-5"], "--max_sentences must be at least 1, got -5"),
        (
            ["--corpus", "embedded", "--column", "x"],
            "--column x: the embedded corpus has no columns",
        ),
        (["--output", "corpus.txt/p"], "--output: corpus.txt/p.png cannot be written"),
    ],
)
def test_what_is_wrong_is_found_before_the_work(
    run: RunExample,
    flags: list[str],
    extra: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sentence_transformers.SentenceTransformer.encode", None
    )  # not to be called
    with pytest.raises(SystemExit, match=f"error: {message}"):
        run(*flags, *extra)


def test_a_terminal_is_told_no_more_than_it_should(run: RunExample) -> None:
    printable = run(name="module")["printable"]
    assert printable("a\x1b[31mb\u202ec\n") == "a [31mb c "
    assert len(printable("word " * 5000)) == 300 and printable("short") == "short"
