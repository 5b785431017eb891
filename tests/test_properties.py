"""What holds for any input, tried on inputs that nobody would think of.

- In every precision the loss is the equation's, taken pair by pair in float64 from the rounded vectors, and
  the streamed loss is the dense one. Neither a vector's length nor a rotation of all of them counts; another
  noise vector never lowers it; it is never negative.
- Any Unicode in any kind of text file is read or refused with the file's name; what is kept and what is
  dropped adds up to the rows; what is kept is visible, distinct, and kept again.
- An arm is what its text says, to the last bit; other text is a ValueError, as for the name of a recipe.
- Any JSON, and any result with any part of it replaced, is a result or the documented error.
"""

from __future__ import annotations

import json
import math
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_cells import result_of
from test_objective import Batch, double_loop, value

from st_gsinfonce import gs_infonce_streamed, load_sentences
from st_gsinfonce.cells import Arm, Cell, CellResult, Setting, Source
from st_gsinfonce.experiments import read_result
from st_gsinfonce.recipes import RECIPES, get_recipe
from st_gsinfonce.sts_results import STSResults

properties = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# --- the objective

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def batches(*dtypes: torch.dtype) -> st.SearchStrategy[Batch]:
    """Batches of one anchor or more, with hard negatives or none, with noise or none."""
    return st.builds(
        Batch.make,
        n=st.integers(1, 8),
        m=st.integers(0, 10),
        dim=st.integers(2, 24),
        offset=st.integers(0, 3),
        hard=st.integers(0, 4),
        distance=st.floats(0.1, 3.0),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**32),
    )


scales = st.floats(0.1, 100)
weights = st.floats(0, 100)


def tolerance(dtype: torch.dtype, scale: float) -> float:
    """Return how far two losses may be apart: a cosine's rounding is multiplied by the scale."""
    return 1e-12 if dtype == torch.float64 else 2e-6 * max(1.0, scale)


@properties
@given(batches(*DTYPES), scales, weights)
@example(Batch.make(1, 0), 20.0, 1.0)
@example(Batch.make(1, 0, offset=2, hard=3, dtype=torch.bfloat16), 20.0, 1.0)
def test_the_loss_is_the_equation_in_every_precision(
    batch: Batch, scale: float, weight: float
) -> None:
    loss = value(batch, scale=scale, noise_weight=weight)
    wanted, _ = double_loop(batch, scale=scale, noise_weight=weight)
    near = tolerance(batch.anchors.dtype, scale)
    assert loss == pytest.approx(wanted, rel=near, abs=near)
    assert loss >= 0


@properties
@given(batches(*DTYPES), scales, weights)
@example(Batch.make(1, 0), 20.0, 1.0)
def test_streamed_is_dense(batch: Batch, scale: float, weight: float) -> None:
    arguments: dict[str, Any] = {"scale": scale, "noise_weight": weight, "offset": batch.offset}
    streamed = gs_infonce_streamed(batch.anchors, batch.candidates, batch.noise, **arguments)
    near = tolerance(batch.anchors.dtype, scale)
    wanted = value(batch, scale=scale, noise_weight=weight)
    assert streamed.item() == pytest.approx(wanted, rel=near, abs=near)


@properties
@given(batches(torch.float64, torch.float32), scales, st.data())
def test_lengths_do_not_count(batch: Batch, scale: float, data: st.DataObject) -> None:
    def longer(rows: torch.Tensor) -> torch.Tensor:
        factors = data.draw(
            st.lists(st.floats(1e-3, 1e3), min_size=len(rows), max_size=len(rows)), label="lengths"
        )
        return rows * torch.tensor(factors, dtype=rows.dtype)[:, None]

    other = Batch(
        longer(batch.anchors), longer(batch.candidates), longer(batch.noise), batch.offset
    )
    near = tolerance(batch.anchors.dtype, scale)
    assert value(other, scale=scale) == pytest.approx(value(batch, scale=scale), rel=near, abs=near)


@properties
@given(batches(torch.float64, torch.float32), scales, st.integers(0, 2**32))
def test_a_rotation_of_all_does_not_count(batch: Batch, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dim, dtype = batch.anchors.shape[1], batch.anchors.dtype
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    rows = (batch.anchors, batch.candidates, batch.noise)
    turned = Batch(*(part @ rotation.to(dtype) for part in rows), batch.offset)
    near = 10 * tolerance(dtype, scale)
    assert value(turned, scale=scale) == pytest.approx(
        value(batch, scale=scale), rel=near, abs=near
    )


def test_a_rotation_of_the_anchors_alone_counts() -> None:
    batch = Batch.make()
    turned = Batch(-batch.anchors, batch.candidates, batch.noise)
    assert value(turned) > 1 + value(batch)


@properties
@given(batches(*DTYPES), scales, weights)
def test_one_more_noise_vector_never_lowers_it(batch: Batch, scale: float, weight: float) -> None:
    losses = []
    for count in range(len(batch.noise) + 1):
        fewer = Batch(batch.anchors, batch.candidates, batch.noise[:count], batch.offset)
        losses.append(value(fewer, scale=scale, noise_weight=weight))
    slack = tolerance(batch.anchors.dtype, scale)
    for less, more in zip(losses, losses[1:], strict=False):
        assert less <= more * (1 + slack)


# --- the corpus

any_text = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Zs", "Cf", "Cc", "Cs", "Mn", "Lo"]), max_size=4),
    st.sampled_from(
        [
            "\u202eright to left",
            "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
            "zero\u200bwidth",
            "\u200b\u2060",
            "\ufeffmark",
            "a\x00b",
            "\x00",
            "\ud83d",
            "\U0001f600",
            "e\u0301",
            "\xe9",
            'a "quote"',
            "a,b",
            "{}",
            "null",
        ]
    ),
)
MEGABYTE = "1 MB " * 200_000


def as_txt(rows: list[str], end: str) -> str:
    return end.join(rows)


def as_csv(rows: list[str], end: str) -> str:
    return "text" + end + "".join(f'"{row.replace(chr(34), 2 * chr(34))}"{end}' for row in rows)


def as_tsv(rows: list[str], end: str) -> str:
    return end.join(["text", *rows]) + end


def as_jsonl(rows: list[str], end: str) -> str:
    return end.join(json.dumps({"text": row}, ensure_ascii=False) for row in rows)


FORMATS = {".txt": as_txt, ".csv": as_csv, ".tsv": as_tsv, ".jsonl": as_jsonl}
HELD_BY_A_LINE = str.maketrans("", "", "\t\r\n")


@pytest.mark.parametrize("suffix", FORMATS)
@properties
@given(
    rows=st.lists(any_text, min_size=1, max_size=8),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
)
@example(rows=["short", MEGABYTE, "\x00"], end="\r\n", mark=True)
def test_any_text_in_a_file_is_read_or_refused_by_name(
    suffix: str, rows: list[str], end: str, mark: bool, tmp_path: Path
) -> None:
    rows = [row.translate(HELD_BY_A_LINE) for row in ["first", *rows, "last"]]
    path = tmp_path / f"any{suffix}"
    text = ("\ufeff" if mark else "") + FORMATS[suffix](rows, end)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    broken = any("\ud800" <= letter <= "\udfff" for letter in text)
    try:
        corpus = load_sentences(path)
    except ValueError as error:
        assert broken or "\x00" in text, error
        assert str(path) in str(error)
        return
    assert not broken
    report = corpus.report
    assert report.total == len(rows)
    assert len(corpus.sentences) + sum(entry.count for entry in report.dropped) == len(rows)
    assert {"first", "last"} <= set(corpus.sentences) <= {row.strip() for row in rows}
    forms = {unicodedata.normalize("NFC", sentence) for sentence in corpus.sentences}
    assert len(forms) == len(corpus.sentences)
    for sentence in corpus.sentences:
        assert any(unicodedata.category(letter)[0] not in "ZC" for letter in sentence)
    again = load_sentences(corpus.sentences)
    assert again.sentences == corpus.sentences and not again.report.dropped


@pytest.mark.parametrize("suffix", FORMATS)
@properties
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_file_of_text_is_read_or_refused_by_name(
    suffix: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / f"any{suffix}"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        corpus = load_sentences(path, min_sentences=1)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert corpus.sentences


# --- arms and recipes

positive = st.floats(0, 1e6, exclude_min=True)
dropouts = st.floats(0, 1, exclude_min=True, exclude_max=True)


@st.composite
def arms(draw: st.DrawFn) -> Arm:
    noise = draw(st.sampled_from(["none", "sampled", "expected"]))
    scale = draw(positive)
    mass = draw(st.floats(-scale, scale)) if noise != "none" and draw(st.booleans()) else None
    has_ratio = noise == "sampled" or (noise == "expected" and mass is None)
    ratio = draw(positive) if has_ratio else 0.0
    return Arm(noise, ratio, mass, draw(dropouts), scale)


@properties
@given(arms())
@example(Arm("sampled", 1 / 3, math.pi, 0.1 + 0.2, 20.000001))
def test_an_arm_is_what_its_text_says(arm: Arm) -> None:
    assert Arm.parse(str(arm)) == arm


ARM_PARTS = "infonce sampled expected : , = ratio b cosine dropout scale 0.1 -3 1e400 nan".split()


@properties
@given(st.one_of(st.text(), st.lists(st.sampled_from(ARM_PARTS)).map("".join)))
def test_any_other_text_is_no_arm(text: str) -> None:
    try:
        arm = Arm.parse(text)
    except ValueError as error:
        assert str(error).startswith(f"arm {text!r}: ")
    else:
        assert Arm.parse(str(arm)) == arm


@properties
@given(st.one_of(st.text(), st.sampled_from([*RECIPES])))
def test_a_recipe_has_its_name_or_there_is_none(name: str) -> None:
    if name in RECIPES:
        assert get_recipe(name).name == name
    else:
        with pytest.raises(ValueError, match="there is no recipe .*bert-base"):
            get_recipe(name)


# --- results in JSON

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
DEEP = "[" * 100_000


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """JSON of which one part, however deep, is replaced or gone."""
    whole = place = json.loads(text)
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if not (isinstance(place[key], dict | list) and place[key] and draw(st.booleans())):
            break
        place = place[key]
    if draw(st.booleans()):
        place[key] = draw(values)
    else:
        del place[key]
    return json.dumps(whole)


CELL = Cell(Arm("sampled", 3.0), 0, Setting(*[Source("a", "0")] * 2, (Source("b", "1"),)))
CELL_JSON = result_of(CELL).to_json()
STS = STSResults({"STS12": 0.5}, "a/b", "c", "cls", {"STS12": 10}, {"mteb": "2"}, 1.0)


# Deep enough for a copy to fail, not for the reader of JSON.
DEEP_SEED = json.dumps(json.loads(CELL_JSON)).replace(
    '"seed": 0', f'"seed": {"[" * 400 + "]" * 400}'
)


@properties
@given(text=st.one_of(values.map(json.dumps), st.text(), damaged(CELL_JSON)))
@example(text=CELL_JSON)
@example(text=DEEP)
@example(text=DEEP_SEED)
@example(text=CELL_JSON.replace('"log_mass": null', '"log_mass": 1e400'))
@example(text="1" * 5000)
def test_any_json_is_the_result_of_a_cell_or_a_value_error(text: str, tmp_path: Path) -> None:
    try:
        result = CellResult.from_json(text)
    except ValueError:
        result = None
    else:
        assert CellResult.from_json(result.to_json()) == result
    path = tmp_path / CELL.file_name
    path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read_result(CELL, tmp_path)
    assert (found is None) == (len(caught) == 1)
    assert found is None or found == result
    assert all("is damaged, the cell is run again" in str(w.message) for w in caught)


@properties
@given(st.one_of(values.map(json.dumps), st.text(), damaged(STS.to_json())))
@example(DEEP)
@example("1" * 5000)
def test_any_json_is_sts_results_or_a_value_error(text: str) -> None:
    try:
        results = STSResults.from_json(text)
    except ValueError as error:
        assert "not the JSON of STSResults" in str(error)
    else:
        assert math.isnan(results.average) or str(results)
        assert STSResults.from_json(results.to_json()).to_json() == results.to_json()
