"""Going on after a kill.

- The newest checkpoint that is whole is found by its number; a newer one that was cut short is skipped with
  a warning that says what it lacks.
- Thirty steps, and fifteen, a SIGKILL while the next checkpoint is written, and the rest in a new process,
  end with the same weights, bit for bit: noise, dropout, head, optimizer and scheduler go on where they were.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sentences
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import set_seed

from st_gsinfonce import GSInfoNCELoss, build_encoder, build_trainer, has_head, last_checkpoint
from st_gsinfonce.weights import weights_digest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that writes a small whole checkpoint and gives its folder."""

    def write(step: int) -> Path:
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "2_Head").mkdir(parents=True)
        for path in (folder, folder / "2_Head"):
            save_file({"weight": torch.ones(64)}, path / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"state": torch.ones(500)}, folder / name)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return folder

    return write


def spoil(path: Path) -> None:
    """Change bytes in the middle: the file still opens."""
    content = bytearray(path.read_bytes())
    start = content.index(torch.ones(100).numpy().tobytes())
    content[start : start + 100] = b"\xff" * 100
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_the_newest_is_the_one_with_the_largest_number(
    checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    folders = {step: checkpoint(step) for step in (1000, 5, 90)}
    (tmp_path / "checkpoint-2000").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "runs").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last_checkpoint(tmp_path) == last_checkpoint(str(tmp_path)) == folders[1000]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "trainer_state.json").unlink(), "no trainer_state.json"),
        (lambda path: cut(path / "trainer_state.json"), "trainer_state.json is cut short"),
        (lambda path: (path / "trainer_state.json").write_bytes(b""), "trainer_state.json is cut"),
        (lambda path: cut(path / "model.safetensors"), "model.safetensors cannot be opened"),
        (
            lambda path: cut(path / "2_Head" / "model.safetensors"),
            "2_Head.model.safetensors cannot",
        ),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "model.safetensors cannot"),
        (
            lambda path: [file.unlink() for file in path.rglob("*.safetensors")],
            "it has no weights",
        ),
        # Without one of these the training would go on, to other weights.
        (lambda path: (path / "optimizer.pt").unlink(), "it has no optimizer .*save_only_model"),
        (lambda path: (path / "scheduler.pt").unlink(), "it has no learning rate's schedule"),
        (lambda path: (path / "rng_state.pth").unlink(), "it has no random state"),
        (lambda path: spoil(path / "optimizer.pt"), "optimizer.pt is damaged in"),
        (lambda path: (path / "modules.json").write_text("{"), "modules.json is damaged"),
    ],
)
def test_a_checkpoint_that_was_cut_short_is_skipped(
    checkpoint: Callable[[int], Path], tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    whole, newer = checkpoint(9), checkpoint(10)
    damage(newer)
    with pytest.warns(UserWarning, match=f"checkpoint-10 is skipped.*{message}"):
        assert last_checkpoint(tmp_path) == whole
    damage(whole)
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        with pytest.warns(UserWarning, match="checkpoint-(9|10) is skipped"):
            last_checkpoint(tmp_path)


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="no whole checkpoint: start without resuming"):
            last_checkpoint(folder)


def train(bert: Path, output: Path, resume: bool = False) -> str:
    """Take 30 steps, or what is left of them, and return the digest of the weights."""
    set_seed(0)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        max_steps=30,
        save_steps=15,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=4,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
    )
    checkpoint = str(last_checkpoint(output)) if resume else None
    arguments.resume_from_checkpoint = checkpoint
    model = build_encoder(bert, seed=0, device="cpu")
    trainer = build_trainer(
        model, make_sentences(100), arguments, loss=GSInfoNCELoss(model, noise_size=40, seed=1)
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    assert has_head(model)
    return weights_digest(model)


ELSEWHERE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoints import torch, train
bert, output, resume = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "resume"
save = torch.save
def killed(thing, file, *args, **kwargs):
    if "checkpoint-30" in str(file):
        Path(file).write_bytes(b"half an optim")
        os.kill(os.getpid(), signal.SIGKILL)
    save(thing, file, *args, **kwargs)
if not resume:
    torch.save = killed
print(train(bert, output, resume))
"""


@pytest.mark.slow
def test_a_killed_run_ends_as_the_uninterrupted_one(tiny_bert: Path, tmp_path: Path) -> None:
    """Slow: imports torch anew, twice."""

    def elsewhere(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ELSEWHERE, str(Path(__file__).parent)]
        return subprocess.run(
            [*command, str(tiny_bert), str(tmp_path / "killed"), what],
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    straight = train(tiny_bert, tmp_path / "straight")
    killed = elsewhere("start")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    cut_short = tmp_path / "killed" / "checkpoint-30"
    assert (cut_short / "model.safetensors").exists()
    resumed = elsewhere("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint-30 is skipped: it has no trainer_state.json" in resumed.stderr
    assert resumed.stdout.split()[-1] == straight
    assert (cut_short / "trainer_state.json").exists()  # now it is whole
    assert last_checkpoint(tmp_path / "killed") == cut_short
