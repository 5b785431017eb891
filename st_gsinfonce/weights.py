"""A digest that tells two sets of weights apart."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(model: nn.Module) -> str:
    """Return the sha256 of all weights with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
