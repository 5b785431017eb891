"""What an experiment is made of: the arm, the setting, the cell, and the result that a cell leaves.

A cell is one training run with its evaluation. Its key is a hash of everything that determines its
numbers and of nothing else, so that two experiments that need the same run share it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from sentence_transformers import SentenceTransformer

from st_gsinfonce.losses import DEFAULT_NOISE_RATIO, GSInfoNCELoss
from st_gsinfonce.objective import expected_log_noise_mass

ARM_SYNTAX = """\
An arm is KIND or KIND:KEY=VALUE,KEY=VALUE. KIND is infonce (no noise), sampled or expected. Keys:
ratio (noise vectors per sentence of a batch, 3), b (log mass of the noise in place of the mass that the
ratio gives), cosine (the same mass as b / scale, one virtual negative's cosine), dropout (0.1), scale (20).
Examples: infonce, sampled:dropout=0.2, expected:b=10, sampled:b=10, expected:cosine=0.5, sampled:ratio=8"""

# What reading JSON of any shape can raise: huge numbers and deep nesting included.
_UNREADABLE = (
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)

_KINDS = {"infonce": "none", "sampled": "sampled", "expected": "expected"}


@dataclass(frozen=True)
class Arm:
    r"""One of the ways to train that an experiment compares: the loss and the dropout.

    Attributes:
        noise: "none" is InfoNCE; "sampled" and "expected" are GS-InfoNCE.
        noise_ratio: M as a multiple of the batch size; 0 where there are no vectors (no noise, or
            expected noise whose mass is given).
        log_mass: :math:`b = \log(\lambda M\,{}_0F_1(; D/2; s^2/4))`, the logarithm of the expected noise
            sum, in nats. None is the mass that ``noise_ratio`` gives with :math:`\lambda = 1`.
        dropout: Of every dropout in the Transformer, in (0, 1).
        scale: s, the inverse temperature.

    Raises:
        ValueError: For values that do not go together, or out of range.
    """

    noise: Literal["none", "sampled", "expected"] = "none"
    noise_ratio: float = 0.0
    log_mass: float | None = None
    dropout: float = 0.1
    scale: float = 20.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.noise not in _KINDS.values():
            raise ValueError(f'noise must be "none", "sampled" or "expected", got {self.noise!r}')
        if not 0 < self.dropout < 1:
            raise ValueError(f"dropout must be in (0, 1), got {self.dropout!r}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a positive number, got {self.scale!r}")
        if not (math.isfinite(self.noise_ratio) and self.noise_ratio >= 0):
            raise ValueError(f"noise_ratio must be 0 or positive, got {self.noise_ratio!r}")
        if self.log_mass is not None and not abs(self.log_mass) <= self.scale:
            raise ValueError(
                f"log_mass must be between -scale and scale, {self.scale}, got {self.log_mass!r}"
            )
        if self.noise == "none" and (self.noise_ratio or self.log_mass is not None):
            raise ValueError("an arm without noise takes neither noise_ratio nor log_mass")
        if self.noise == "sampled" and self.noise_ratio == 0:
            raise ValueError("sampled noise needs a noise_ratio above 0")
        if self.noise == "expected" and (self.noise_ratio == 0) == (self.log_mass is None):
            raise ValueError("expected noise takes noise_ratio or log_mass, one of them")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the arm that a text in `ARM_SYNTAX` names; equal losses give equal arms.

        Raises:
            ValueError: If the text is none, with the syntax.
        """
        kind, _, rest = text.strip().partition(":")
        try:
            noise = _KINDS[kind]
            pairs = [part.split("=") for part in rest.split(",")] if rest else []
            values = {key.strip(): float(value) for key, value in pairs}
            if len(values) < len(pairs):
                raise ValueError("a key is there twice")
            dropout, scale = values.pop("dropout", 0.1), values.pop("scale", 20.0)
            mass = values.pop("b", None)
            if "cosine" in values:
                if mass is not None:
                    raise ValueError("b and cosine both give the mass")
                mass = values.pop("cosine") * scale
            given = values.pop("ratio", None)
            if values:
                raise ValueError(f"there is no key {next(iter(values))!r}")
            ratio = DEFAULT_NOISE_RATIO if given is None else given
            if noise == "none" and (mass is not None or given):
                raise ValueError("infonce has no noise: use sampled or expected")
            if noise == "none" or (ratio == 0 and mass is None):
                return cls(dropout=dropout, scale=scale)
            if noise == "expected" and mass is not None:
                if given is not None:
                    raise ValueError("expected noise takes a ratio or its mass, one of them")
                ratio = 0.0
            return cls(noise, ratio, mass, dropout, scale)  # type: ignore[arg-type]
        except (KeyError, ValueError) as error:
            reason = f"no kind {kind!r}" if isinstance(error, KeyError) else error
            raise ValueError(f"arm {text!r}: {reason}\n{ARM_SYNTAX}") from error

    @property
    def kind(self) -> str:
        """The first word of the arm in `ARM_SYNTAX`."""
        return next(kind for kind, noise in _KINDS.items() if noise == self.noise)

    def __str__(self) -> str:
        """Return the arm in `ARM_SYNTAX`, complete: ``parse`` reads it back."""
        parts = [f"ratio={_exact(self.noise_ratio)}"] if self.noise_ratio else []
        parts += [f"b={_exact(self.log_mass)}"] if self.log_mass is not None else []
        parts += [f"dropout={_exact(self.dropout)}"]
        parts += [f"scale={_exact(self.scale)}"] if self.scale != 20 else []
        return f"{self.kind}:{','.join(parts)}"

    @property
    def label(self) -> str:
        """The arm in words, for tables."""
        words = ["InfoNCE" if self.noise == "none" else f"GS {self.noise}"]
        words += [f"M = {self.noise_ratio:g} x batch"] if self.noise_ratio else []
        words += [f"b = {self.log_mass:g}"] if self.log_mass is not None else []
        words += [f"dropout {self.dropout:g}"]
        words += [f"scale {self.scale:g}"] if self.scale != 20 else []
        return ", ".join(words)

    def mass(self, dim: int, batch_size: int) -> float:
        """Return the logarithm of the expected noise sum of a whole batch; -inf without noise.

        Args:
            dim: Width of the embeddings.
            batch_size: Sentences in the batch.
        """
        if self.noise == "none":
            return -math.inf
        if self.log_mass is not None:
            return self.log_mass
        return expected_log_noise_mass(dim, self.scale, round(self.noise_ratio * batch_size))

    def build_loss(self, model: SentenceTransformer, batch_size: int, seed: int) -> GSInfoNCELoss:
        """Return the loss; its noise leaves the global generators alone.

        Args:
            model: The encoder.
            batch_size: Sentences in a whole batch, to which the number of noise vectors relates.
            seed: Seed of the noise.
        """
        if self.noise == "none":
            return GSInfoNCELoss(model, self.scale, noise_size=0, seed=seed)
        if self.log_mass is None:
            return GSInfoNCELoss(
                model, self.scale, noise_ratio=self.noise_ratio, noise=self.noise, seed=seed
            )
        if self.noise == "expected":
            cosine = self.log_mass / self.scale
            return GSInfoNCELoss(
                model, self.scale, noise="expected", virtual_cosine=cosine, seed=seed
            )
        # The number is fixed, so that an incomplete last batch meets the same mass as every other.
        num_noise = round(self.noise_ratio * batch_size)
        dim = model.get_embedding_dimension()
        if dim is None:
            raise ValueError("the encoder does not say how wide its embeddings are")
        weight = math.exp(self.log_mass - expected_log_noise_mass(dim, self.scale, num_noise))
        return GSInfoNCELoss(
            model, self.scale, noise_size=num_noise, noise_weight=weight, seed=seed
        )


def _exact(number: float) -> str:
    """Return a number's shortest text that reads back as it."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


@dataclass(frozen=True)
class Source:
    """Data or weights by content.

    Attributes:
        name: For people; neither part of a cell's key nor of the comparison of two sources.
        sha256: Digest of the content.
    """

    name: str = field(compare=False)  # the same data under another name is the same
    sha256: str


@dataclass(frozen=True)
class Setting:
    """What all arms of an experiment have in common.

    Attributes:
        encoder: The encoder to start from.
        corpus: The training sentences.
        evaluation: The data to score on.
        pooling: A pooling mode, or "model" for the model's own.
        head: Whether to train through the train-only head.
        max_seq_length: Tokens.
        batch_size: Sentences.
        learning_rate: At the first step; it falls linearly to 0.
        epochs: Passes over the corpus, where ``max_steps`` is -1.
        max_steps: Optimizer steps, or -1.
        precision: "bf16", "fp16" or "fp32", of the training; scores are computed in float32.
        device: "cpu", "cuda" or "mps": their dropout masks differ, so they are not to be paired.
        eval_steps: Steps between two evaluations on STS-B dev.
        select: "final" scores the last step's weights; "best" those that were best on STS-B dev.
    """

    encoder: Source
    corpus: Source
    evaluation: tuple[Source, ...]
    pooling: str = "cls"
    head: bool = True
    max_seq_length: int = 32
    batch_size: int = 64
    learning_rate: float = 3e-5
    epochs: float = 1.0
    max_steps: int = -1
    precision: str = "fp32"
    device: str = "cpu"
    eval_steps: int = 125
    select: Literal["final", "best"] = "final"


@dataclass(frozen=True)
class Cell:
    """One run: an arm, a seed, a setting.

    The seed decides batches, initial head, dropout masks and noise. Cells of equal seed and setting
    have the same batches and the same initial head; those of equal dropout the same masks, too.

    Raises:
        ValueError: If the arm's noise ratio gives the setting's batch no noise vector.
    """

    arm: Arm
    seed: int
    setting: Setting

    def __post_init__(self) -> None:
        """Check what the arm alone cannot."""
        if self.arm.noise_ratio and round(self.arm.noise_ratio * self.setting.batch_size) == 0:
            raise ValueError(
                f"arm {self.arm}: {self.arm.noise_ratio:g} noise vectors per sentence of a batch of "
                f"{self.setting.batch_size} are none; give a larger ratio, or infonce for no noise"
            )

    @property
    def key(self) -> str:
        """A sha256 of what determines the cell's numbers: names are no part of it."""
        text = json.dumps(_without_names(asdict(self)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """The name of the cell's result: readable, and unique by the key."""
        arm = str(self.arm).replace(":", "-").replace(",", "-").replace("=", "")
        return f"{arm}-seed{self.seed}-{self.key[:16]}.json"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the cell of which ``dataclasses.asdict`` made the mapping."""
        setting = dict(values["setting"])
        for name in ("encoder", "corpus"):
            setting[name] = Source(**setting[name])
        setting["evaluation"] = tuple(Source(**source) for source in setting["evaluation"])
        return cls(Arm(**values["arm"]), values["seed"], Setting(**setting))


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {each.name for each in fields(Source)}:
            return value["sha256"]
        return {key: _without_names(entry) for key, entry in value.items()}
    return [_without_names(entry) for entry in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class CellResult:
    """What one cell left.

    Attributes:
        cell: What was run.
        scores: By name, in points (times 100): the STS tasks and "Avg.", "STS-B dev", "docs MRR@10",
            "docs recall@1", as far as the setting has the data.
        dev: STS-B dev by step while training, in points.
        losses: Mean training loss by step, each over the steps since the one before.
        statistics: Of the last batch: see ``GSInfoNCEStatistics``; without those that it has none of.
        log_mass: Logarithm of the expected noise sum of a whole batch; None without noise.
        steps: Optimizer steps done.
        best_step: Step of the scored weights where the best were selected.
        seconds: "training" (with its evaluations) and "evaluation".
        weights_sha256: Digest of the trained encoder's weights, head removed.
        run: Command, date, versions, hardware.
    """

    cell: Cell
    scores: Mapping[str, float]
    dev: Mapping[int, float]
    losses: Mapping[int, float]
    statistics: Mapping[str, float]
    log_mass: float | None
    steps: int
    best_step: int | None
    seconds: Mapping[str, float]
    weights_sha256: str
    run: Mapping[str, Any]

    def to_json(self) -> str:
        """Return all fields and the cell's key as JSON; `from_json` reads it back without loss."""
        return json.dumps({"key": self.cell.key, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: If the text is no such JSON, or its key is not its cell's.
        """
        try:
            values = json.loads(text)
            json.dumps(values, allow_nan=False)  # to_json writes no NaN and no infinity
            key = values.pop("key")
            values["cell"] = cell = Cell.from_dict(values["cell"])
            for name in ("dev", "losses"):
                values[name] = {int(step): value for step, value in values[name].items()}
            result, wanted = cls(**values), cell.key
            numbers = [*result.scores.values(), *result.dev.values(), *result.losses.values()]
            if not result.scores or not all(isinstance(x, (int, float)) for x in numbers):
                raise TypeError("a score or a loss is no number, or there is no score")
        except _UNREADABLE as error:
            raise ValueError(f"not the JSON of a cell: {error!r}") from error
        if key != wanted:
            raise ValueError(f"the key {key!r} is not that of the cell, {wanted!r}")
        return result
