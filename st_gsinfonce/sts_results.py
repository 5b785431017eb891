"""What an encoder scored, as a frozen record, and its entry in the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator


@dataclass(frozen=True)
class STSResults:
    """What one encoder scored, and everything needed to say which encoder that was.

    ``str()`` prints the row of the paper's table, times 100 with two decimals.

    Attributes:
        scores: cosine_spearman by task, in [-1, 1], in the order asked for.
        model_name: The name given to MTEB, ``organisation/model``.
        revision: The caller's, or else a hash of the weights and of the settings that shape an
            embedding (40 hexadecimal digits).
        pooling: The pooling mode of the encoder, None if it has no Pooling module.
        pairs: Number of scored pairs by task.
        versions: Version of each library that had a part in the numbers.
        seconds: Wall-clock time of encoding and scoring, without loading the data.
    """

    scores: Mapping[str, float]
    model_name: str
    revision: str
    pooling: str | None
    pairs: Mapping[str, int]
    versions: Mapping[str, str]
    seconds: float

    @property
    def average(self) -> float:
        """Unweighted mean of the tasks' scores, as the paper averages its seven."""
        return sum(self.scores.values()) / len(self.scores)

    def row(self) -> dict[str, float]:
        """Return the scores by task, then ``Avg.``, in points (times 100)."""
        points = {task: 100 * score for task, score in self.scores.items()}
        return {**points, "Avg.": 100 * self.average}

    def __str__(self) -> str:
        """Return the row under its heads, for a terminal."""
        row = self.row()
        widths = [max(len(head), 6) for head in row]
        heads = "  ".join(f"{head:>{width}}" for head, width in zip(row, widths, strict=True))
        values = "  ".join(
            f"{value:>{width}.2f}" for value, width in zip(row.values(), widths, strict=True)
        )
        return (
            f"{self.model_name} @ {self.revision[:12]} (pooling: {self.pooling})\n{heads}\n{values}"
        )

    def to_markdown(self) -> str:
        """Return a Markdown table of one row, in points with two decimals."""
        row = self.row()
        return "\n".join(
            [
                f"| Model | {' | '.join(row)} |",
                f"|:---|{'---:|' * len(row)}",
                f"| {self.model_name} | {' | '.join(f'{value:.2f}' for value in row.values())} |",
            ]
        )

    def to_json(self) -> str:
        """Return all fields and the average as JSON; `from_json` reads it back without loss."""
        return json.dumps({**asdict(self), "average": self.average}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> STSResults:
        """Read what `to_json` wrote.

        Raises:
            ValueError: If ``text`` is not such a JSON object.
        """
        try:
            fields = json.loads(text)
            fields.pop("average")
            results = cls(**fields)
            _check_types(results)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"not the JSON of STSResults: {error}") from error
        return results


_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "scores": dict,
    "model_name": str,
    "revision": str,
    "pooling": (str, type(None)),
    "pairs": dict,
    "versions": dict,
    "seconds": (int, float),
}


def _check_types(results: STSResults) -> None:
    for name, wanted in _FIELD_TYPES.items():
        if not isinstance(value := getattr(results, name), wanted):
            raise ValueError(f"{name} is {value!r}")
    if not results.scores or not all(isinstance(s, float) for s in results.scores.values()):
        raise ValueError(f"scores must name a number by task, got {results.scores!r}")


def record_in_model_card(
    model: SentenceTransformer, results: STSResults, epoch: float = 0, step: int = 0
) -> None:
    """Enter scores in ``model.model_card_data``, one dataset per task and one for their average.

    Args:
        model: The encoder that was evaluated; only its card data changes.
        results: What `evaluate_sts` returned for it.
        epoch: Epoch of training, for the card's table of logs.
        step: Step of training, likewise.
    """
    for task, score in {**results.scores, "STS-average": results.average}.items():
        metrics = {f"{task}_spearman_cosine": score}
        _CardEntry(task).store_metrics_in_model_card_data(model, metrics, epoch, step)  # type: ignore[arg-type]


class _CardEntry(BaseEvaluator):
    """The name under which a card shows one score; cards merge equal kinds into one table."""

    description = "Semantic Similarity"

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.primary_metric = f"{name}_spearman_cosine"


def model_name(name: str | None, weights_hash: str) -> str:
    """Return the ``organisation/model`` under which MTEB files the results.

    Args:
        name: The caller's name; ``local/`` is put before one without organisation.
        weights_hash: What names the encoder where the caller did not.

    Raises:
        ValueError: If ``name`` has more than one slash or an empty part.
    """
    if name is None:
        return f"local/encoder-{weights_hash[:12]}"
    full = name if "/" in name else f"local/{name}"
    if full.count("/") != 1 or not all(full.split("/")):
        raise ValueError(f"name must be MODEL or ORGANISATION/MODEL, got {name!r}")
    return full
