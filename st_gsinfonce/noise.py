"""Gaussian noise that is named by a key, not taken from a generator that others use too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NOISE_BLOCK_ROWS = 1024
"""Noise is defined in blocks of this many rows, each with its own key, whoever draws them."""


@dataclass(frozen=True)
class NoiseKey:
    """Names one draw of noise: equal keys give equal vectors, and no other generator is touched.

    Attributes:
        seed: Seed of the run, from 0 to 2**64 - 1, as are the other two.
        step: Optimizer step.
        call: Number of the draw within the step.
    """

    seed: int
    step: int
    call: int

    def block(self, index: int, rows: int, dim: int, device: torch.device) -> Tensor:
        """Return the first ``rows`` standard normal vectors of block ``index``, float32, (rows, D)."""
        numbers = np.array([self.seed, self.step, self.call, index], dtype=np.uint64)
        # All 64 bits of each: a list of Python integers would run (2**32, 0, 1) and (0, 1, 2**32) together.
        sequence = np.random.SeedSequence(numbers.view(np.uint32))
        if device.type == "cpu":
            # torch's CPU generator keeps 32 bits of its seed: a long run would draw a block twice.
            generator = np.random.Generator(np.random.Philox(sequence))
            return torch.from_numpy(generator.standard_normal((rows, dim), dtype=np.float32))
        seed = int(sequence.generate_state(1, np.uint64)[0]) >> 1  # torch takes a signed integer
        on_device = torch.Generator(device=device).manual_seed(seed)
        return torch.randn((rows, dim), generator=on_device, device=device, dtype=torch.float32)


def noise_blocks(
    key: NoiseKey,
    num_noise: int,
    dim: int,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Yield the noise of a key in blocks of at most ``NOISE_BLOCK_ROWS`` rows.

    Args:
        key: Which draw.
        num_noise: M, how many vectors in all.
        dim: D, their width.
        mean: Mean of every component.
        std: Standard deviation of every component.
        device: Where to draw; a CPU and a GPU draw different vectors for one key.

    Yields:
        float32 tensors of shape (rows, D).
    """
    device = torch.device(device)
    for index, start in enumerate(range(0, num_noise, NOISE_BLOCK_ROWS)):
        rows = min(NOISE_BLOCK_ROWS, num_noise - start)
        block = key.block(index, rows, dim, device)
        yield block if (mean, std) == (0.0, 1.0) else block * std + mean


def draw_noise(
    key: NoiseKey,
    num_noise: int,
    dim: int,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return all noise vectors of a key at once, float32, (M, D); see :func:`noise_blocks`."""
    blocks = list(noise_blocks(key, num_noise, dim, mean=mean, std=std, device=device))
    if not blocks:
        return torch.empty(0, dim, device=device)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
