"""Two thousand steps, with evaluation and checkpoints, leave no trace behind but the checkpoints asked for.

- The process needs no more memory at step 2,000 than at step 200, within 5%, and has no more files open.
- No more checkpoints are there than asked for, the newest and the best among them.
- No noise is drawn twice.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import make_sentences
from torch import Tensor
from transformers import TrainerCallback

from st_gsinfonce import STSEvaluator, build_encoder, build_trainer, last_checkpoint
from st_gsinfonce.noise import NoiseKey

pytestmark = [
    pytest.mark.nightly,  # minutes
    pytest.mark.skipif(os.name != "posix", reason="file handles are counted on POSIX"),
    pytest.mark.filterwarnings("ignore:.*has .* pairs:UserWarning"),  # a made-up STS set
]

EVERY, STEPS, KEPT = 200, 2000, 2


class Meter(TrainerCallback):
    """What the process holds, and which checkpoints there are, at every save."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.checkpoints: dict[int, set[str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        process, step = psutil.Process(), state.global_step
        self.memory[step] = process.memory_info().rss
        self.handles[step] = process.num_fds()
        folders = Path(args.output_dir).glob("checkpoint-*")
        self.checkpoints[step] = {path.name for path in folders}
        print(f"step {step}: {self.memory[step] / 2**20:.1f} MiB, {self.handles[step]} files open")


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NoiseKey, int, bytes]]:
    """The key, the block and a digest of all noise that is drawn."""
    drawn: list[tuple[NoiseKey, int, bytes]] = []
    block = NoiseKey.block

    def watched(self: NoiseKey, index: int, *args: Any) -> Tensor:
        noise = block(self, index, *args)
        drawn.append((self, index, hashlib.sha256(noise.numpy().tobytes()).digest()))
        return noise

    monkeypatch.setattr(NoiseKey, "block", watched)
    return drawn


def test_a_long_run(
    tiny_bert: Path, sts_tasks: Path, training_arguments: Any, tmp_path: Path, draws: list[Any]
) -> None:
    model = build_encoder(tiny_bert, seed=0, device="cpu")
    arguments = training_arguments(
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=KEPT,
        logging_strategy="steps",
        logging_steps=25,
        load_best_model_at_end=True,
        metric_for_best_model="eval_sts-dev_spearman_cosine",
        greater_is_better=True,
    )
    meter = Meter()
    evaluator = STSEvaluator(data_dir=str(sts_tasks))
    sentences = make_sentences(1000)
    trainer = build_trainer(model, sentences, arguments, evaluator=evaluator, callbacks=[meter])
    trainer.train()

    assert list(meter.memory) == list(range(EVERY, STEPS + 1, EVERY))
    assert meter.memory[STEPS] <= 1.05 * meter.memory[EVERY]
    assert meter.handles[STEPS] <= meter.handles[EVERY]

    for step, names in meter.checkpoints.items():
        assert f"checkpoint-{step}" in names and len(names) <= KEPT
    assert last_checkpoint(tmp_path / "trainer").name == f"checkpoint-{STEPS}"
    assert Path(trainer.state.best_model_checkpoint).is_dir()

    keys = {(key, index) for key, index, _ in draws}
    digests = {digest for _, _, digest in draws}
    assert len(draws) >= STEPS and len(keys) == len(digests) == len(draws)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
