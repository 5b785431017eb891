"""GS-InfoNCE as a sentence-transformers loss: validate, embed, draw noise, call the objective."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import (
    all_gather_with_grad,
    cos_sim,
    dot_score,
    get_rank,
    similarity_fct_name,
)
from torch import Tensor, nn

from st_gsinfonce import objective
from st_gsinfonce.citations import GS_INFONCE, SIMCSE
from st_gsinfonce.columns import Features, merge_columns
from st_gsinfonce.noise import NoiseKey, draw_noise, noise_blocks
from st_gsinfonce.objective import GSInfoNCEStatistics, Similarity, inner_product
from st_gsinfonce.streamed import gs_infonce_streamed

DEFAULT_NOISE_RATIO = 3.0

STREAMED_FROM = 2**26  # logits, 256 MiB, which training would hold several times over
STATISTICS_ROWS = 256  # anchors that the statistics look at, however large the batch

_cached_log_noise_mass = lru_cache(maxsize=256)(objective.expected_log_noise_mass)


@dataclass(frozen=True)
class _Batch:
    """The arguments of one call of the objective, free of the graph; noise by its key."""

    anchors: Tensor
    candidates: Tensor
    offset: int
    key: NoiseKey
    num_noise: int


class GSInfoNCELoss(nn.Module):
    r"""Gaussian-smoothed InfoNCE: in-batch negatives and Gaussian noise as further negatives.

    .. math::

        \ell_i = -\log \frac{e^{s \cos(h_i, h^+_i)}}
                 {\sum_j e^{s \cos(h_i, h^+_j)} + \lambda \sum_{k=1}^{M} e^{s \cos(h_i, g_k)}},
        \qquad g_k \sim \mathcal N(\mu, \sigma^2 I)

    Given one column of texts, both views of a text come from one forward pass over the batch twice, with
    different dropout masks: unsupervised SimCSE. Given two or more columns they are anchor, positive and
    hard negatives, as in ``MultipleNegativesRankingLoss``; with ``noise_size=0`` the two losses are equal.

    With ``noise="expected"`` the noise is not sampled: its expected sum, which is a constant under cosine
    similarity and mean 0 (:func:`~st_gsinfonce.objective.expected_log_noise_mass`), takes its place.

    The noise never touches the global random generators: dropout masks and batches are the same with and
    without it. A draw is keyed by (seed, step, call within the step); see :meth:`set_step`. Calls without
    gradients, such as those of an evaluation loss, use one fixed draw and advance nothing.

    Args:
        model: The encoder. Its dropout must be on in training for one-column use.
        scale: :math:`s = 1 / \tau`, the inverse temperature; the paper's 20 is a temperature of 0.05.
        noise_ratio: M as a multiple of the batch size (of all devices together when gathering), rounded.
            None means 3, the paper's, unless ``noise_size`` or ``virtual_cosine`` is given.
        noise_size: M itself; 0 switches the noise off.
        noise_weight: :math:`\lambda`, at least 0.
        noise_mean: :math:`\mu` of every component.
        noise_std: :math:`\sigma` of every component, positive. No effect under cosine similarity with
            mean 0, where only the direction of the noise counts.
        noise: "sampled", or "expected" for the closed form.
        virtual_cosine: With ``noise="expected"``, the mass of the noise given directly: as one virtual
            negative that has this cosine with every anchor, in [-1, 1]. Takes the place of
            ``noise_ratio``, ``noise_size`` and ``noise_weight``. The paper's setting for BERT-base is 0.28.
        seed: Seed of the noise, at least 0. None follows ``torch.initial_seed()`` at the first draw.
        similarity_fct: Maps (N, D) and (C, D) to (N, C).
        gather_across_devices: Compare each device's anchors with the candidates of all devices.
        merge_views: Embed columns that tokenize alike in one forward pass. ``AdaptiveLayerLoss`` and
            ``Matryoshka2dLoss`` around this loss need False, and two columns
            (:class:`~st_gsinfonce.collator.SimCSEDataCollator` makes them).
        streamed: Compute the logits in tiles and never hold them all
            (:func:`~st_gsinfonce.streamed.gs_infonce_streamed`). None does so for large batches, from 2**26
            logits on. True needs cosine similarity or ``dot_score``. The loss is the same.

    Raises:
        ValueError: For a value out of its range or settings that exclude each other; at the first
            batch, for one column with ``merge_views=False`` and for a model in ``DataParallel``.

    Inputs:
        +-------------------------------------------------+--------+
        | Inputs                                          | Labels |
        +=================================================+========+
        | single texts                                    | none   |
        +-------------------------------------------------+--------+
        | (anchor, positive) pairs                        | none   |
        +-------------------------------------------------+--------+
        | (anchor, positive, negative_1, ..., negative_n) | none   |
        +-------------------------------------------------+--------+

    Relations:
        - ``MultipleNegativesRankingLoss`` with the same scale is this loss without noise.
        - Unsupervised SimCSE (Gao et al., 2021) is this loss on single texts without noise.

    References:
        - GS-InfoNCE, Wu et al., COLING 2022: https://arxiv.org/abs/2109.04321
        - SimCSE, Gao et al., EMNLP 2021: https://arxiv.org/abs/2104.08821

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformerTrainer
            from st_gsinfonce import GSInfoNCELoss, build_encoder, strip_head

            model = build_encoder("bert-base-uncased")
            train_dataset = Dataset.from_dict({"text": ["A river runs.", "Bread is baked.", "It rains."]})
            trainer = SentenceTransformerTrainer(
                model=model, train_dataset=train_dataset, loss=GSInfoNCELoss(model)
            )
            trainer.train()
            strip_head(model).save_pretrained("encoder")
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        noise_ratio: float | None = None,
        noise_size: int | None = None,
        noise_weight: float = 1.0,
        noise_mean: float = 0.0,
        noise_std: float = 1.0,
        noise: Literal["sampled", "expected"] = "sampled",
        virtual_cosine: float | None = None,
        seed: int | None = None,
        similarity_fct: Similarity = cos_sim,
        gather_across_devices: bool = False,
        merge_views: bool = True,
        streamed: bool | None = None,
    ) -> None:
        super().__init__()
        _require("scale", scale, "a positive number", lambda x: x > 0)
        _require("noise_weight", noise_weight, "0 or a positive number", lambda x: x >= 0)
        _require("noise_mean", noise_mean, "a number", lambda x: True)
        _require("noise_std", noise_std, "a positive number", lambda x: x > 0)
        if noise_ratio is not None:
            _require("noise_ratio", noise_ratio, "0 or a positive number", lambda x: x >= 0)
        if noise_size is not None:
            _require("noise_size", noise_size, "0 or a positive integer", _is_natural)
        if seed is not None:
            fits = "None or an integer from 0 to 2**64 - 1"
            _require("seed", seed, fits, lambda x: _is_natural(x) and x < 2**64)
        if noise not in ("sampled", "expected"):
            raise ValueError(f'noise must be "sampled" or "expected", got {noise!r}')
        if not callable(similarity_fct) or streamed not in (None, True, False):
            wrong = f"similarity_fct={similarity_fct!r}, streamed={streamed!r}"
            raise ValueError(
                f"similarity_fct must be a function, streamed a bool or None, got {wrong}"
            )
        cosine = similarity_fct in (cos_sim, objective.cos_sim)
        if noise == "expected" and not (cosine and noise_mean == 0):
            raise ValueError(
                'noise="expected" holds under cosine similarity and noise_mean=0 alone, got '
                f"similarity_fct={similarity_fct_name(similarity_fct)} and noise_mean={noise_mean}: "
                'use noise="sampled"'
            )
        if streamed and not (cosine or similarity_fct is dot_score):
            raise ValueError(
                "streamed=True needs cosine similarity or dot_score, got "
                f"similarity_fct={similarity_fct_name(similarity_fct)}: use streamed=False"
            )
        if noise_ratio is not None and noise_size is not None:
            raise ValueError(
                f"noise_ratio={noise_ratio} and noise_size={noise_size} both say how many noise "
                "vectors there are: give one of them"
            )
        if virtual_cosine is not None:
            _require("virtual_cosine", virtual_cosine, "in [-1, 1]", lambda x: -1 <= x <= 1)
            if noise != "expected":
                raise ValueError(
                    'virtual_cosine is the mass of expected noise: add noise="expected"'
                )
            if noise_ratio is not None or noise_size is not None or noise_weight != 1:
                raise ValueError(
                    "virtual_cosine is the whole mass of the noise: leave out noise_ratio, noise_size "
                    "and noise_weight"
                )
        elif noise_ratio is None and noise_size is None:
            noise_ratio = DEFAULT_NOISE_RATIO

        self.model = model
        self.scale = scale
        self.noise_ratio = noise_ratio
        self.noise_size = noise_size
        self.noise_weight = noise_weight
        self.noise_mean = noise_mean
        self.noise_std = noise_std
        self.noise = noise
        self.virtual_cosine = virtual_cosine
        self.seed = seed
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.merge_views = merge_views
        self.streamed = streamed
        # Our cosine where theirs is asked for: equal, but for a zero vector's gradient.
        self._similarity = objective.cos_sim if cosine else similarity_fct
        if similarity_fct is dot_score:
            self._similarity = inner_product
        self._may_stream = streamed is not False and (cosine or similarity_fct is dot_score)
        self._step = 0
        self._calls = 0
        self._checked_in_mode: bool | None = None
        self._warned = False
        self._last_batch: _Batch | None = None

    def set_step(self, step: int) -> None:
        """Key the noise that follows by an optimizer step, which makes a resumed run exact.

        :func:`~st_gsinfonce.training.build_trainer` adds the callback that calls this. Without it the
        loss counts its own calls: just as random, but a resumed run draws other noise. ``step`` is the number
        of steps completed so far.
        """
        self._step = step
        self._calls = 0

    def forward(
        self, sentence_features: Iterable[Features], labels: Tensor | None = None
    ) -> Tensor:
        """Return the scalar loss of a batch of tokenized columns; labels are not used."""
        return self.compute_loss_from_embeddings(self._embed(list(sentence_features)), labels)

    def compute_loss_from_embeddings(
        self, embeddings: Sequence[Tensor], labels: Tensor | None = None
    ) -> Tensor:
        """Return the scalar loss of embedded columns: anchors, positives, then hard negatives.

        Args:
            embeddings: At least two tensors of shape (N, D).
            labels: Not used.

        Raises:
            ValueError: For fewer than two columns, or a model in ``DataParallel``.
        """
        if len(embeddings) < 2:
            raise ValueError(f"the loss needs anchors and positives, got {len(embeddings)} column")
        if isinstance(self.model, nn.DataParallel):
            raise ValueError(
                "one process trains on several GPUs (DataParallel), where random states cannot be "
                "replayed: start one process a GPU with torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )
        anchors, *columns = embeddings
        self._warn_if_blind(anchors, columns[0])
        offset = 0
        if self.gather_across_devices:
            offset = get_rank() * len(anchors)
            columns = [all_gather_with_grad(column) for column in columns]
        candidates = torch.cat(columns)  # (C, D)
        num_noise = self._num_noise(len(columns[0]))
        batch = _Batch(anchors, candidates, offset, self._next_key(), num_noise)
        if torch.is_grad_enabled():
            looked_at = anchors[:STATISTICS_ROWS].detach()
            self._last_batch = replace(batch, anchors=looked_at, candidates=candidates.detach())
        logits = len(anchors) * (len(candidates) + batch.num_noise)
        if self._may_stream and (self.streamed or logits >= STREAMED_FROM):
            return gs_infonce_streamed(**self._arguments(batch, in_blocks=True))
        return objective.gs_infonce(**self._arguments(batch))

    @property
    def statistics(self) -> GSInfoNCEStatistics | None:
        """Similarities and noise share of the last batch with gradients; None before it.

        Computed when read, over at most 256 of its anchors; a training that never reads them pays nothing.
        """
        if (batch := self._last_batch) is None:
            return None
        return objective.gs_infonce_statistics(**self._arguments(batch))

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for the model card."""
        return {
            "scale": self.scale,
            "noise": self.noise,
            "noise_ratio": self.noise_ratio,
            "noise_size": self.noise_size,
            "noise_weight": self.noise_weight,
            "noise_mean": self.noise_mean,
            "noise_std": self.noise_std,
            "virtual_cosine": self.virtual_cosine,
            "seed": self.seed,
            "similarity_fct": similarity_fct_name(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
            "merge_views": self.merge_views,
            "streamed": self.streamed,
        }

    @property
    def temperature(self) -> float:
        r""":math:`\tau = 1 / s`."""
        return 1.0 / self.scale

    @property
    def citation(self) -> str:
        """BibTeX of GS-InfoNCE and of SimCSE, which it smooths."""
        return GS_INFONCE + SIMCSE

    def _embed(self, columns: list[Features]) -> list[Tensor]:
        if not columns:
            raise ValueError("the batch has no text column")
        if len(columns) == 1:
            if not self.merge_views:
                raise ValueError(
                    "merge_views=False needs two columns, got one: train with SimCSEDataCollator"
                )
            columns = [columns[0], dict(columns[0])]
        merged = merge_columns(columns) if self.merge_views else None
        if merged is None:
            return [self.model(column)["sentence_embedding"] for column in columns]
        embeddings: Tensor = self.model(merged)["sentence_embedding"]  # (columns * N, D)
        return list(embeddings.chunk(len(columns)))

    def _warn_if_blind(self, anchors: Tensor, positives: Tensor) -> None:
        # Looked at whenever the mode has changed, since encode() leaves a model in eval mode; at every
        # step it would stall a GPU.
        if not torch.is_grad_enabled() or self.model.training == self._checked_in_mode:
            return
        self._checked_in_mode = self.model.training
        if self._warned or not torch.equal(anchors, positives):
            return
        self._warned = True
        cause = (
            "its dropout probability is 0"
            if self.model.training
            else "it is in eval mode, as encode() leaves it: call model.train()"
        )
        warnings.warn(
            "both views of every text have the same embedding, so the loss has nothing to learn from: "
            f"the model runs without dropout because {cause}",
            stacklevel=3,
        )

    def _next_key(self) -> NoiseKey:
        if self.seed is None:
            self.seed = torch.initial_seed()
        if not torch.is_grad_enabled():
            return NoiseKey(self.seed, step=0, call=0)
        self._calls += 1  # from 1: the fixed draw of calls without gradients is none of training's
        return NoiseKey(self.seed, self._step, self._calls)

    def _num_noise(self, batch_size: int) -> int:
        if self.noise_size is not None:
            return self.noise_size
        return 0 if self.noise_ratio is None else round(self.noise_ratio * batch_size)

    def _arguments(self, batch: _Batch, in_blocks: bool = False) -> dict[str, Any]:
        """Return the objective's arguments; noise is drawn, or a function that draws it in blocks."""
        dim = batch.anchors.shape[-1]
        arguments: dict[str, Any] = {
            "anchors": batch.anchors,
            "candidates": batch.candidates,
            "scale": self.scale,
            "offset": batch.offset,
            "similarity": self._similarity,
        }
        if self.virtual_cosine is not None:
            arguments["log_noise_mass"] = self.scale * self.virtual_cosine
        elif self.noise == "expected":
            arguments["log_noise_mass"] = _cached_log_noise_mass(
                dim, self.scale, batch.num_noise, self.noise_weight
            )
        elif batch.num_noise and self.noise_weight:
            arguments["noise_weight"] = self.noise_weight
            draw = partial(
                noise_blocks if in_blocks else draw_noise,
                batch.key,
                batch.num_noise,
                dim,
                mean=self.noise_mean,
                std=self.noise_std,
                device=batch.anchors.device,
            )
            arguments["noise"] = draw if in_blocks else draw()
        return arguments


def _require(name: str, value: float, wanted: str, holds: Callable[[float], bool]) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and holds(value)):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _is_natural(value: float) -> bool:
    return isinstance(value, int) and value >= 0
