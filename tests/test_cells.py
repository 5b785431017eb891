"""What an experiment is made of.

- Equal losses are equal arms, however they were written; an arm's text reads back as itself.
- The loss that an arm builds has the mass that the arm names, sampled or not.
- A cell's key holds what determines its numbers, and nothing else; it never changes by accident.
- A result reads back without loss, and nothing else passes for one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_gsinfonce import GSInfoNCELoss, expected_log_noise_mass
from st_gsinfonce.cells import Arm, Cell, CellResult, Setting, Source

SETTING = Setting(
    encoder=Source("encoder", "e" * 64),
    corpus=Source("corpus", "c" * 64),
    evaluation=(Source("STS", "5" * 64),),
)
CELL = Cell(Arm(), 0, SETTING)


def result_of(cell: Cell, **scores: float) -> CellResult:
    return CellResult(
        cell=cell,
        scores=scores or {"STS-B dev": 80.0, "Avg.": 70.0},
        dev={125: 79.5},
        losses={25: 0.1, 50: 0.05},
        statistics={"noise_share": 0.0},
        log_mass=None,
        steps=157,
        best_step=None,
        seconds={"training": 1.0, "evaluation": 2.0},
        weights_sha256="w" * 64,
        run={"command": "python x.py", "versions": {}, "hardware": {"gpu": None}},
    )


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("infonce", Arm()),
        ("infonce:dropout=0.2", Arm(dropout=0.2)),
        ("sampled", Arm("sampled", 3.0)),
        ("sampled:ratio=0", Arm()),
        ("expected:ratio=0,dropout=0.2", Arm(dropout=0.2)),
        ("sampled:ratio=8", Arm("sampled", 8.0)),
        ("sampled:b=10", Arm("sampled", 3.0, 10.0)),
        ("sampled:b=10,ratio=1,dropout=0.2", Arm("sampled", 1.0, 10.0, 0.2)),
        ("expected", Arm("expected", 3.0)),
        ("expected:b=10", Arm("expected", 0.0, 10.0)),
        ("expected:cosine=0.5", Arm("expected", 0.0, 10.0)),
        ("expected: cosine=0.65 , dropout=0.2", Arm("expected", 0.0, 13.0, 0.2)),
        ("expected:b=5,scale=10", Arm("expected", 0.0, 5.0, 0.1, 10.0)),
        ("expected:cosine=-0.5", Arm("expected", 0.0, -10.0)),
    ],
)
def test_arms_are_parsed(text: str, arm: Arm) -> None:
    assert Arm.parse(text) == arm
    assert Arm.parse(str(arm)) == arm
    assert arm.label and arm.kind in str(arm)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no kind ''"),
        ("simcse", "no kind 'simcse'"),
        ("infonce:b=10", "infonce has no noise"),
        ("infonce:ratio=3", "infonce has no noise"),
        ("expected:b=10,ratio=3", "one of them"),
        ("expected:b=10,cosine=0.5", "both give the mass"),
        ("expected:b=10,b=11", "twice"),
        ("sampled:sigma=2", "no key 'sigma'"),
        ("sampled:dropout", "not enough values"),
        ("sampled:ratio=many", "could not convert"),
        ("sampled:ratio=-1", "noise_ratio must be"),
        ("sampled:ratio=0,b=10", "sampled noise needs a noise_ratio"),
        ("sampled:dropout=0", "dropout must be in"),
        ("sampled:dropout=1", "dropout must be in"),
        ("sampled:scale=0", "scale must be"),
        ("expected:cosine=1.1", "log_mass must be between"),
        ("expected:b=nan", "log_mass must be between"),
    ],
)
def test_what_is_no_arm(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Arm.parse(text)
    assert "Examples: infonce" in str(caught.value)  # the syntax is at hand


def test_arms_that_contradict_themselves() -> None:
    with pytest.raises(ValueError, match="without noise"):
        Arm("none", 3.0)
    with pytest.raises(ValueError, match="one of them"):
        Arm("expected", 3.0, 10.0)
    with pytest.raises(ValueError, match="noise must be"):
        Arm("gaussian")  # type: ignore[arg-type]


def noise_sum(loss: GSInfoNCELoss, anchor: Tensor) -> float:
    """Return the noise's part of the denominator, from the loss of one pair: log(1 + part / e^-s)."""
    value = loss.compute_loss_from_embeddings([anchor, -anchor]).item()
    return math.expm1(value) * math.exp(-loss.scale)


@pytest.mark.parametrize(
    "text", ["sampled:ratio=9999,scale=5", "sampled:b=4,ratio=9999,scale=5", "expected:b=3"]
)
def test_the_loss_has_the_mass_that_the_arm_names(
    text: str, make_encoder: Callable[..., SentenceTransformer]
) -> None:
    arm = Arm.parse(text)
    loss = arm.build_loss(make_encoder(), 1, seed=0)
    anchors = torch.randn(30, 1, 32, generator=torch.Generator().manual_seed(0))
    sums = [noise_sum(loss, anchor) for anchor in anchors]
    assert math.log(sum(sums) / len(sums)) == pytest.approx(arm.mass(32, 1), abs=0.03)
    assert (max(sums) > 1.001 * min(sums)) == (arm.noise == "sampled")


def test_a_given_mass_is_that_of_an_incomplete_batch_too(
    make_encoder: Callable[..., SentenceTransformer],
) -> None:
    loss = Arm.parse("sampled:b=10").build_loss(make_encoder(), 64, seed=0)
    assert loss.noise_size == 192 and loss.noise_ratio is None
    assert math.log(loss.noise_weight) == pytest.approx(10 - expected_log_noise_mass(32, 20, 192))
    published = Arm.parse("sampled").build_loss(make_encoder(), 64, seed=0)
    assert published.noise_ratio == 3 and published.noise_weight == 1


def test_a_ratio_that_gives_a_batch_no_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.001 noise vectors per sentence of a batch of 64 are"):
        Cell(Arm("sampled", 0.001), 0, SETTING)
    assert Cell(Arm("sampled", 0.01), 0, SETTING).arm.mass(32, 64) > 0  # one vector


def test_the_mass_of_arms() -> None:
    assert Arm().mass(384, 64) == -math.inf
    assert Arm("expected", 3.0).mass(768, 64) == pytest.approx(5.52, abs=0.005)
    assert Arm("sampled", 3.0).mass(768, 64) == Arm("expected", 3.0).mass(768, 64)
    assert Arm("sampled", 3.0, 10.0).mass(768, 64) == 10.0


def test_the_key_never_changes_by_accident() -> None:
    # Results are found by it: a change makes every finished run be run again.
    assert CELL.key == "d35577bcd06c601613a7b0bb4e3751c6708bfda6c34709071663b4ff303c3605"
    assert CELL.file_name == f"infonce-dropout0.1-seed0-{CELL.key[:16]}.json"
    noisy = Cell(Arm("expected", 0.0, 10.0, 0.2), 3, SETTING)
    assert noisy.key == "b481ea7b4e5342f113c0befb66dc52d2d2413a5ad1a5b6573bad654938367a15"
    assert noisy.file_name.startswith("expected-b10-dropout0.2-seed3-")


def test_names_are_no_part_of_the_key() -> None:
    renamed = replace(
        SETTING,
        encoder=replace(SETTING.encoder, name="a"),
        corpus=replace(SETTING.corpus, name="b"),
        evaluation=(replace(SETTING.evaluation[0], name="c"),),
    )
    assert Cell(Arm(), 0, renamed).key == CELL.key


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder": Source("encoder", "f" * 64)},
        {"corpus": Source("corpus", "d" * 64)},
        {"evaluation": (*SETTING.evaluation, Source("docs", "0" * 64))},
        {"pooling": "mean"},
        {"head": False},
        {"max_seq_length": 64},
        {"batch_size": 32},
        {"learning_rate": 1e-5},
        {"epochs": 2.0},
        {"max_steps": 10},
        {"precision": "bf16"},
        {"device": "cuda"},
        {"eval_steps": 50},
        {"select": "best"},
    ],
)
def test_every_setting_is_part_of_the_key(changes: dict[str, object]) -> None:
    changed = replace(SETTING, **changes)  # type: ignore[arg-type]
    assert Cell(Arm(), 0, changed).key != CELL.key


def test_arm_and_seed_are_part_of_the_key() -> None:
    arms = [Arm(), Arm(dropout=0.2), Arm("sampled", 3.0), Arm("sampled", 4.0), Arm(scale=10.0)]
    arms += [Arm("sampled", 3.0, 10.0), Arm("expected", 3.0), Arm("expected", 0.0, 10.0)]
    keys = {Cell(arm, seed, SETTING).key for arm in arms for seed in (0, 1)}
    assert len(keys) == 2 * len(arms)


def test_a_result_reads_back_without_loss() -> None:
    result = result_of(CELL)
    again = CellResult.from_json(result.to_json())
    assert again == result and again.cell == CELL
    assert json.loads(result.to_json())["key"] == CELL.key


@pytest.mark.parametrize("cut", [0, 1, 40, 400, -3])
def test_a_truncated_result_is_none(cut: int) -> None:
    with pytest.raises(ValueError, match="not the JSON of a cell"):
        CellResult.from_json(result_of(CELL).to_json()[:cut])


@pytest.mark.parametrize("text", ["[]", "{}", "null", "3", '{"key": "a"}'])
def test_other_json_is_no_result(text: str) -> None:
    with pytest.raises(ValueError, match="not the JSON of a cell"):
        CellResult.from_json(text)


@pytest.mark.parametrize("part", ["scores", "dev", "losses"])
def test_what_is_no_number_is_no_result(part: str) -> None:
    values = json.loads(result_of(CELL).to_json())
    values[part] = {"1": "85.1"}
    with pytest.raises(ValueError, match="a score or a loss is no number"):
        CellResult.from_json(json.dumps(values))
    with pytest.raises(ValueError, match="there is no score"):
        CellResult.from_json(json.dumps(values | {"scores": {}}))


def test_a_result_of_another_cell_is_found_out() -> None:
    values = json.loads(result_of(CELL).to_json())
    values["cell"]["seed"] = 7
    with pytest.raises(ValueError, match="is not that of the cell"):
        CellResult.from_json(json.dumps(values))
    del values["scores"]
    with pytest.raises(ValueError, match="scores"):
        CellResult.from_json(json.dumps(values))
