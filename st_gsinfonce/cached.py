"""GS-InfoNCE with gradient caching: a batch as large as you like in the memory of a mini-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import CachedLossMixin, has_static_embedding_input
from torch import Tensor

from st_gsinfonce.citations import GRADCACHE
from st_gsinfonce.columns import Features
from st_gsinfonce.losses import GSInfoNCELoss


class CachedGSInfoNCELoss(CachedLossMixin, GSInfoNCELoss):
    """GSInfoNCELoss whose memory for the encoder is bounded by a mini-batch, by GradCache.

    The batch is embedded in mini-batches without gradients, the loss and its gradients are computed for
    the embeddings of the whole batch, and each mini-batch is embedded once more, under the same dropout
    masks, to carry them on. Value and gradients are those of :class:`GSInfoNCELoss` on the whole batch;
    the price is a second forward pass. The machinery is sentence-transformers' own; the objective, the
    noise and the settings are the superclass's.

    Given one column of texts, each view is embedded by passes of its own.

    Args:
        model: The encoder.
        *args: As for :class:`GSInfoNCELoss`.
        mini_batch_size: Texts that are embedded at a time, at least 1.
        show_progress_bar: Whether to show a bar over the mini-batches.
        **kwargs: As for :class:`GSInfoNCELoss`; ``merge_views`` has no effect here.

    Raises:
        ValueError: As :class:`GSInfoNCELoss` does, for a mini-batch size below 1, and for a model whose
            inputs cannot be split into mini-batches (StaticEmbedding).

    References:
        - Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP
          2021: https://arxiv.org/abs/2101.06983
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *args: Any,
        mini_batch_size: int = 32,
        show_progress_bar: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, *args, **kwargs)
        if (
            isinstance(mini_batch_size, bool)
            or not isinstance(mini_batch_size, int)
            or mini_batch_size < 1
        ):
            raise ValueError(f"mini_batch_size must be a positive integer, got {mini_batch_size!r}")
        if has_static_embedding_input(model):
            raise ValueError(
                "a model with StaticEmbedding cannot be embedded in mini-batches: use GSInfoNCELoss"
            )
        self.mini_batch_size = mini_batch_size
        self.show_progress_bar = show_progress_bar

    def forward(
        self, sentence_features: Iterable[Features], labels: Tensor | None = None
    ) -> Tensor:
        """Return the scalar loss of a batch of tokenized columns; labels are not used."""
        columns = list(sentence_features)
        if len(columns) == 1:
            columns = [columns[0], dict(columns[0])]
        loss: Tensor = self.forward_cached(columns, labels)
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss of the embeddings of all mini-batches, by column.

        Args:
            reps: Tensors of shape (mini-batch, D) for each column.
            labels: Not used.
            with_backward: Carry the gradients back to the embeddings at once and return the value alone.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if with_backward:
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for the model card."""
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}

    @property
    def citation(self) -> str:
        """BibTeX of GS-InfoNCE, SimCSE and GradCache."""
        return super().citation + GRADCACHE
