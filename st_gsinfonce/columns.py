"""Tokenized text columns as one batch, so that an encoder runs once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Features = dict[str, Any]
"""A tokenized column, as ``model.preprocess`` makes it: tensors with a row for each text, and settings."""


def merge_columns(columns: list[Features]) -> Features | None:
    """Return the rows of all columns as one batch, column after column.

    Args:
        columns: At least one.

    Returns:
        The batch, or None where the columns do not line up row by row: other keys, other shapes, other
        settings, or flattened inputs.
    """
    first = columns[0]
    tokens = first.get("attention_mask", first.get("input_ids"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or "cu_seq_lens_q" in first:
        return None  # flattened inputs: rows are no axis of their tensors
    if any(column.keys() != first.keys() for column in columns):
        return None
    merged: Features = {}
    for key, value in first.items():
        values = [column[key] for column in columns]
        if isinstance(value, Tensor) and key != "prompt_length":  # one length for all rows
            if value.ndim == 0 or len(value) != len(tokens):
                return None
            if any(not isinstance(v, Tensor) or v.shape != value.shape for v in values):
                return None
            merged[key] = torch.cat(values)
        elif all(_equal(v, value) for v in values):
            merged[key] = value
        else:
            return None
    return merged


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)
