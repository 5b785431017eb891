"""Encode sentences for scoring, each once, and say which encoder that was."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from st_gsinfonce.weights import weights_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray


def encode_once(
    model: SentenceTransformer,
    sentences: list[str],
    label: str,
    prompt: str | None,
    batch_size: int,
    show_progress_bar: bool,
    truncate_dim: int | None = None,
) -> NDArray[np.float32]:
    """Encode distinct sentences in one call of ``encode``, which goes longest first.

    The model comes back in the mode (train or eval, module by module) in which it came.

    Args:
        model: The encoder.
        sentences: Distinct sentences.
        label: What errors call the model.
        prompt: Prompt for all of them; None leaves it to the model's default.
        batch_size: Sentences per forward pass.
        show_progress_bar: Whether to show one bar over sentences, on rank 0.
        truncate_dim: Dimensions to keep; None leaves it to the model.

    Returns:
        Embeddings in float32, (sentences, dimensions), in the order given.

    Raises:
        ValueError: If an embedding is NaN or infinite, or all are the same.
    """
    modes = [(module, module.training) for module in model.modules()]
    shown = show_progress_bar and is_main_process()
    bar = tqdm(total=len(sentences), desc="Sentences", unit="sentence", disable=not shown)

    def count(module: torch.nn.Module, args: Any, output: dict[str, Any]) -> None:
        bar.update(len(output["sentence_embedding"]))

    hook = model.register_forward_hook(count)
    try:
        encoded = model.encode(
            sentences,
            prompt=prompt,
            batch_size=batch_size,
            show_progress_bar=False,
            truncate_dim=truncate_dim,
        )
        bar.update(len(sentences) - bar.n)  # where ranks share the call, each sees its part
    finally:
        hook.remove()
        bar.close()
        for module, training in modes:
            module.training = training
    vectors = np.asarray(encoded, dtype=np.float32)  # (sentences, dimensions)
    broken = ~np.isfinite(vectors).all(axis=1)
    if broken.any():
        raise ValueError(
            f"{label}: {broken.sum()} of {len(sentences)} embeddings hold NaN or infinity, the first "
            f"for {sentences[int(broken.argmax())]!r}"
        )
    first = vectors[0]
    if len(vectors) > 1 and np.allclose(vectors, first, rtol=1e-5, atol=1e-6 * np.abs(first).max()):
        raise ValueError(
            f"{label}: all {len(sentences)} embeddings are the same (a collapsed encoder), so no "
            "correlation is defined"
        )
    return vectors


def task_prompt(model: SentenceTransformer, task: str) -> str | None:
    """Return the prompt that MTEB picks: the model's for this task, else for all of type STS.

    None leaves it to ``encode``, which takes the model's default prompt if it has one.
    """
    for key in (task, "STS"):
        if key in model.prompts:
            return model.prompts[key]
    return None


def pooling_mode(model: SentenceTransformer) -> str | None:
    """Return how an encoder pools its tokens (``"cls"``, ``"mean"``...), None if nothing says."""
    for module in model.modules():
        if isinstance(module, Pooling):
            mode = module.get_config_dict()["pooling_mode"]
            return mode if isinstance(mode, str) else "+".join(mode)
    return None


def fingerprint(model: SentenceTransformer) -> str:
    """Hash the weights and the settings that decide an embedding, as 40 hexadecimal digits."""
    settings = (
        repr(model),  # modules, pooling
        model.max_seq_length,
        model.truncate_dim,
        sorted(model.prompts.items()),
        model.default_prompt_name,
        model.similarity_fn_name,
    )
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(weights_digest(model).encode())
    return digest.hexdigest()[:40]


@contextmanager
def random_states_kept(model: SentenceTransformer) -> Iterator[None]:
    """Put the global generators of Python, NumPy, torch and the model's device back afterwards."""
    states = random.getstate(), np.random.get_state()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def is_main_process() -> bool:
    """Return whether this is rank 0, or the only process."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0
    )
