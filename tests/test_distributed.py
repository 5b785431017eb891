"""Several processes, started by torchrun and by accelerate, over gloo on the CPU.

- With gathering, the loss of K processes and its gradients, after DDP's averaging, are those of one process
  with the whole batch: with hard negatives, the head, cached, streamed, and with gradient checkpointing.
- All processes meet the same noise, as much of it as the whole batch asks for.
- A training without dropout ends the same however many processes share the batch, and an incomplete last
  batch does not hang it.
- The training script runs under both launchers: one process writes, all of them evaluate.
- What is wrong ends all processes with a reason, not one of them while the others wait; and what one process
  has begun to write is nothing wrong to the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CARRIED_IN_FLOAT32, make_sentences
from distributed_worker import BATCH, CASES, STEPS, encoder, run_case, train
from sentence_transformers import SentenceTransformer

from st_gsinfonce import has_head, last_checkpoint
from st_gsinfonce.noise import NoiseKey, draw_noise

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "examples" / "train_unsup.py"
EXACT = {"rtol": 1e-8, "atol": 1e-12}
CARRIED = {"rtol": 1e-5, "atol": 1e-8} if CARRIED_IN_FLOAT32 else EXACT
SECONDS = 180  # far more than it takes: a hang is a failure, a busy machine is none

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# --multi_gpu is how accelerate starts several processes without MPI; the script then says --use-cpu.
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    "--num_processes",
)


def launch(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a launcher with a time limit that ends its workers, too."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"not done after {SECONDS} seconds:\n{output}\n{errors}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # names of 5.0
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_are_one_with_the_whole_batch(
    processes: int, tiny_bert: Path, tmp_path: Path
) -> None:
    """Slow: each process imports torch anew."""
    done = launch(*TORCHRUN, processes, TESTS / "distributed_worker.py", tiny_bert, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(processes)]

    noise = draw_noise(NoiseKey(0, 7, 1), 3 * BATCH, 32)
    for results in ranks:
        assert torch.equal(results["noise"], noise)
        for name, case in CASES.items():
            expected, found = run_case(case, tiny_bert), results[name]
            assert found.keys() == expected.keys()
            assert expected["2.linear.weight"].any()  # the head takes part
            for key, tensor in expected.items():
                torch.testing.assert_close(
                    found[key],
                    tensor,
                    **CARRIED if "cached" in name else EXACT,
                    msg=f"{name}: {key}",
                )

    expected = train(tiny_bert, tmp_path / "one", 1, STEPS * BATCH, BATCH)
    start = dict(encoder(tiny_bert).named_parameters())
    for results in ranks:
        found = results["training"]
        assert found.pop("steps") == STEPS
        for name in start:
            assert (found[name] - expected[name]).abs().max() <= 1e-4, name
        assert max((found[name] - start[name]).abs().max() for name in found) > 1e-3  # it moved
        assert results["incomplete"]["steps"] == 1
    assert (tmp_path / "shared" / "written").exists()


@pytest.fixture
def data(tmp_path: Path) -> list[object]:
    """Arguments for a few short steps of the training script on the tiny encoder, but for the model."""
    sentences = make_sentences(65)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(sentences), encoding="utf-8")
    dev = tmp_path / "sts" / "STSBenchmark" / "validation.jsonl"
    dev.parent.mkdir(parents=True)
    pairs = zip(sentences[:12], sentences[1:13], strict=True)
    rows = [
        {"sentence1": a, "sentence2": b, "score": len(set(a.split()) & set(b.split()))}
        for a, b in pairs
    ]
    dev.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    text = (
        f"--corpus {corpus} --eval-data {tmp_path / 'sts'} --precision fp32 --use-cpu true "
        "--per-device-train-batch-size 16 --gather-across-devices --mini-batch-size 6 --max-steps 4 "
        "--eval-steps 2 --save-steps 2 --learning-rate 1e-3 --disable-tqdm true"
    )
    return [*text.split(), "--output", tmp_path / "run"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_the_training_script_runs(
    launcher: tuple[str, ...], data: list[object], tiny_bert: Path, tmp_path: Path
) -> None:
    """Slow: each process imports torch anew."""
    done = launch(*launcher, 2, SCRIPT, "--model", tiny_bert, *data)
    assert done.returncode == 0, done.stderr
    for line in ("STS-B dev before", "STS-B dev after", "Saved to"):
        assert done.stdout.count(line) == 1  # said by one process
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-4"
    assert {path.name for path in (checkpoints / "checkpoint-4").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    scores = (checkpoints / "eval" / "similarity_evaluation_sts-dev_results.csv").read_text()
    assert len(scores.splitlines()) == 3  # a header and the steps 2 and 4, once each
    assert not has_head(run / "encoder")
    SentenceTransformer(str(run / "encoder"), device="cpu")
    assert json.loads((run / "run.json").read_text())["loss"]["mini_batch_size"] == 6


@pytest.mark.slow
def test_an_output_that_is_taken_ends_all_processes(
    data: list[object], tiny_bert: Path, tmp_path: Path
) -> None:
    """Slow: each process imports torch anew."""
    taken = tmp_path / "run" / "checkpoints" / "notes.txt"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    done = launch(*TORCHRUN, 2, SCRIPT, "--model", tiny_bert, *data)
    assert done.returncode != 0
    assert "checkpoints holds notes.txt" in done.stderr
    assert [path.name for path in taken.parent.iterdir()] == ["notes.txt"]
