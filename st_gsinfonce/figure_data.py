"""What figures are drawn from: small frozen records that go to JSON and come back.

Every record holds the single numbers; means and deviations are computed from them, so that a figure and
its data cannot disagree.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from st_gsinfonce.analysis import FalseNegativeProbe
from st_gsinfonce.report import Comparison, GridReport


@dataclass(frozen=True)
class ProbeData:
    """The false-negative probe: similarity of a batch's nearest negatives by the size of the batch.

    Attributes:
        probe: What was measured.
        threshold: The cosine above which negatives are taken for false ones.
        title: Which encoder, which sentences.
    """

    probe: FalseNegativeProbe
    threshold: float
    title: str


@dataclass(frozen=True)
class Point:
    """A published number, to be drawn beside ours."""

    x: float
    difference: float


@dataclass(frozen=True)
class Curve:
    """One score along a swept setting.

    Attributes:
        label: Name of the score.
        x: The setting, rising.
        scores: At each x the scores in points, one a seed.
        baseline: The scores without what is swept, one a seed.
        paper: Published differences to no noise, in points.
    """

    label: str
    x: tuple[float, ...]
    scores: tuple[tuple[float, ...], ...]
    baseline: tuple[float, ...]
    paper: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        """Check that there is an x, and that every x has scores."""
        whole = len(self.x) == len(self.scores) and all(self.scores)
        if not (self.x and whole and self.baseline):
            raise ValueError(
                f"curve {self.label!r}: scores must hold at least one score for each of the "
                f"{len(self.x)} x and baseline at least one, got {len(self.scores)} groups, "
                f"{len(self.baseline)} of the baseline"
            )

    @property
    def zero(self) -> float:
        """The mean score without what is swept: where a difference is 0."""
        return statistics.fmean(self.baseline)


@dataclass(frozen=True)
class SweepData:
    """Scores along a swept setting.

    Attributes:
        curves: One for each score.
        xlabel: What x is, with its unit.
        title: Of the figure.
        log_x: Whether x doubles from tick to tick, and the ticks are the points themselves.
        scale: s, where x is the log mass b: a second axis then says the cosine b / s.
        paper_label: For the legend, where a curve has published points.
    """

    curves: tuple[Curve, ...]
    xlabel: str
    title: str
    log_x: bool = False
    scale: float | None = None
    paper_label: str = "paper"

    def __post_init__(self) -> None:
        """Check that x can be drawn."""
        if self.log_x and min(x for curve in self.curves for x in curve.x) <= 0:
            raise ValueError("curves must have x above 0 where log_x is True")


@dataclass(frozen=True)
class ComparisonRow:
    """One arm's paired differences to the baseline, one a seed; no interval and p value for one seed."""

    label: str
    differences: tuple[float, ...]
    low: float | None
    high: float | None
    p_value: float | None


@dataclass(frozen=True)
class ComparisonPanel:
    """One score of all arms."""

    metric: str
    rows: tuple[ComparisonRow, ...]


@dataclass(frozen=True)
class ComparisonData:
    """Arms against a baseline, by one or more scores."""

    baseline: str
    panels: tuple[ComparisonPanel, ...]

    @classmethod
    def of(cls, comparisons: Iterable[Comparison]) -> ComparisonData:
        """Return the data of comparisons with one baseline, score by score in their order.

        Raises:
            ValueError: If there is no comparison, or they have several baselines.
        """
        chosen = list(comparisons)
        if len({c.baseline for c in chosen}) != 1:
            raise ValueError("comparisons must have one baseline, and there must be at least one")
        panels = []
        for metric in dict.fromkeys(c.metric for c in chosen):
            rows = tuple(
                ComparisonRow(
                    c.treated.label,
                    c.difference.differences,
                    *map(
                        _none_for_nan, (c.difference.low, c.difference.high, c.difference.p_value)
                    ),
                )
                for c in chosen
                if c.metric == metric
            )
            panels.append(ComparisonPanel(metric, rows))
        return cls(chosen[0].baseline.label, tuple(panels))


@dataclass(frozen=True)
class History:
    """Values by training step, of one run."""

    seed: int
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, seed: int, values: Mapping[int, float]) -> History:
        """Return the history of a mapping from step to value."""
        return cls(seed, tuple(sorted(values)), tuple(values[step] for step in sorted(values)))


@dataclass(frozen=True)
class ArmHistory:
    """How one arm trained, run by run.

    Attributes:
        label: The arm.
        losses: Mean training loss of the steps since the one before.
        dev: STS-B dev in points; empty where it was not scored.
    """

    label: str
    losses: tuple[History, ...]
    dev: tuple[History, ...]


@dataclass(frozen=True)
class TrainingData:
    """How the arms of a grid trained."""

    arms: tuple[ArmHistory, ...]

    @classmethod
    def of(cls, report: GridReport) -> TrainingData:
        """Return the histories of a grid's runs."""
        arms = []
        for arm, by_seed in report.arms.items():
            runs = sorted(by_seed.items())
            losses = tuple(History.of(seed, run.losses) for seed, run in runs if run.losses)
            dev = tuple(History.of(seed, run.dev) for seed, run in runs if run.dev)
            arms.append(ArmHistory(arm.label, losses, dev))
        return cls(tuple(arms))


@dataclass(frozen=True)
class EncoderCosines:
    """The cosine similarity of each pair by one encoder.

    Attributes:
        label: The encoder.
        spearman: Rank correlation with the gold scores, in points.
        cosines: In the order of the pairs.
    """

    label: str
    spearman: float
    cosines: tuple[float, ...]


@dataclass(frozen=True)
class SimilarityData:
    """Cosine similarities of sentence pairs against their gold scores, by several encoders.

    Attributes:
        task: Where the pairs are from.
        gold: Human judgement of each pair, higher for more similar.
        encoders: Before and after, say.
        edges: Of the bins of gold scores, rising.
    """

    task: str
    gold: tuple[float, ...]
    encoders: tuple[EncoderCosines, ...]
    edges: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)

    def __post_init__(self) -> None:
        """Check that every pair has a cosine and a bin."""
        for encoder in self.encoders:
            if len(encoder.cosines) != len(self.gold):
                raise ValueError(
                    f"encoder {encoder.label!r} has {len(encoder.cosines)} cosines for "
                    f"{len(self.gold)} gold scores"
                )
        if not self.gold or min(self.gold) < self.edges[0] or max(self.gold) > self.edges[-1]:
            raise ValueError(
                f"{self.task}: gold scores must be between {self.edges[0]:g} and {self.edges[-1]:g}, the "
                "ends of edges, and there must be at least one"
            )

    def bins(self) -> list[list[int]]:
        """Return the pairs of each bin; the last bin holds its upper edge, too."""
        rows: list[list[int]] = [[] for _ in self.edges[1:]]
        for row, gold in enumerate(self.gold):
            place = sum(gold >= edge for edge in self.edges) - 1
            rows[min(place, len(rows) - 1)].append(row)
        return rows


FigureData = ProbeData | SweepData | ComparisonData | TrainingData | SimilarityData

KINDS: dict[str, type[FigureData]] = {
    "probe": ProbeData,
    "sweep": SweepData,
    "comparison": ComparisonData,
    "training": TrainingData,
    "similarity": SimilarityData,
}
"""The kinds of figures, as their JSON names them."""


def figure_data_to_json(data: FigureData, **more: Any) -> str:
    """Return the data of a figure as JSON; `read_figure_data` reads it back without loss.

    Args:
        data: What the figure is drawn from.
        **more: Further entries, such as how the numbers were made; reading leaves them alone.
    """
    kind = next(kind for kind, cls in KINDS.items() if isinstance(data, cls))
    record = {**more, "figure": kind, "data": asdict(data)}
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def read_figure_data(path: str | os.PathLike[str]) -> FigureData:
    """Read the data of a figure.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is no JSON of a figure; names the file and what is wrong.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("figure") not in KINDS:
            raise ValueError(f'its entry "figure" must be one of {", ".join(KINDS)}')
        data: FigureData = _build(KINDS[record["figure"]], record.get("data"), "data")
    except ValueError as error:
        raise ValueError(f"{path} is not the JSON of a figure: {error}") from error
    return data


def _build(kind: Any, value: Any, where: str) -> Any:
    """Return the value as the annotation wants it, or say where it is another."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, got {value!r}")
        hints = get_type_hints(kind)
        if missing := [f.name for f in fields(kind) if f.name not in value]:
            raise ValueError(f"{where} lacks {missing[0]!r}")
        built = {name: _build(hints[name], value[name], f"{where}.{name}") for name in hints}
        return kind(**built)  # type: ignore[operator]  # is_dataclass takes instances, too
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        item = get_args(kind)[0]
        return tuple(_build(item, one, f"{where}[{place}]") for place, one in enumerate(value))
    allowed = tuple(get_args(kind)) or (kind,)
    if float in allowed:
        allowed += (int,)  # JSON may write 3.0 as 3
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
        raise ValueError(f"{where} must be {names}, got {value!r}")
    return value


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
