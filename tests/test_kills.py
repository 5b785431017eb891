"""Whole runs of the training script, killed at any moment, and on disks that are full or read-only.

- Whenever it is killed, by SIGTERM or SIGKILL, ``--resume`` ends with the weights of the uninterrupted run,
  bit for bit; killed before it has left anything, the same command does.
- Meanwhile nothing half-written stands under its final name: no encoder, no settings, and no checkpoint that
  would be gone on from.
- A full disk ends the run with the checkpoint to go on from, and it goes on once there is space; no encoder
  is left half-written. An output folder that is read-only is named; a cache that is does no harm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from killed_run import MOMENTS
from sentence_transformers import SentenceTransformer

from st_gsinfonce import last_checkpoint, load_encoder

pytestmark = [
    pytest.mark.nightly,  # some eighty runs
    pytest.mark.skipif(os.name != "posix", reason="signals of POSIX"),
]

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "examples" / "train_unsup.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # another number of threads, another rounding


@pytest.fixture(scope="module")
def flags(tiny_bert: Path, sts_tasks: Path, corpus_of_70: Path) -> list[str]:
    """Arguments of a run of eight steps with four checkpoints, of which the last and the best stay."""
    text = (
        f"--model {tiny_bert} --corpus {corpus_of_70} --eval-data {sts_tasks} "
        "--precision fp32 --use-cpu true --disable-tqdm true "
        "--per-device-train-batch-size 16 --max-steps 8 --eval-steps 2 --save-steps 2 --save-total-limit 1 "
        "--learning-rate 1e-2"
    )
    return text.split()


AFTER_A_CHECKPOINT = list(MOMENTS)[list(MOMENTS).index("in the first checkpoint") + 1 :]


class Run(NamedTuple):
    """How a run ended, and what it printed."""

    code: int
    printed: str


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that runs the script: ``start(output, "--resume", moment=..., number="SIGKILL")``."""
    log = tmp_path_factory.mktemp("logs") / "log"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "killed_run.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )

    def run(output: Path, *more: str, moment: str | None = None, number: str = "SIGKILL") -> Run:
        assert process.stdin and process.stdout
        order = {
            "script": str(SCRIPT),
            "arguments": [*flags, "--output", str(output), *more],
            "log": str(log),
            "moment": moment,
            "signal": number,
        }
        print(json.dumps(order), file=process.stdin, flush=True)
        return Run(int(process.stdout.readline()), log.read_text())

    with process:
        yield run
        process.terminate()


def weights(output: Path) -> bytes:
    return (output / "encoder" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that every run has to end with."""
    output = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = start(output)
    assert done.code == 0, done.printed
    return weights(output)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_ends_as_if_it_had_not_been(
    start: Start, uninterrupted: bytes, tmp_path: Path, moment: str, number: str
) -> None:
    output = tmp_path / "run"
    killed = start(output, moment=moment, number=number)
    assert killed.code == -signal.Signals[number], killed.printed
    assert not (output / "encoder").exists()
    if (output / "run.json").exists():
        json.loads((output / "run.json").read_text())
    if moment in AFTER_A_CHECKPOINT:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the one that was cut short
            load_encoder(last_checkpoint(output / "checkpoints"), device="cpu")
    resumed = start(output, *(["--resume"] if output.exists() else []))
    assert resumed.code == 0, resumed.printed
    assert weights(output) == uninterrupted
    SentenceTransformer(str(output / "encoder"), device="cpu")


def test_a_run_killed_again_and_again(start: Start, uninterrupted: bytes, tmp_path: Path) -> None:
    output = tmp_path / "run"
    for moment in (
        "in the first step",
        "saving the optimizer",
        "loading the best",
        "writing the card",
    ):
        killed = start(output, *(["--resume"] if output.exists() else []), moment=moment)
        assert killed.code == -signal.SIGKILL, (moment, killed.printed)
    assert start(output, "--resume").code == 0
    assert weights(output) == uninterrupted


# --- disks

UNSHARE = ["unshare", "--mount", "--map-root-user"]
ON_A_DISK = """
mount -t tmpfs -o "$1" tmpfs "$2" || exit 99
disk="$2" kept="$3"
shift 3
"$@"
code=$?
cp -a "$disk/." "$kept"
exit $code
"""


class Disk:
    """A small disk of its own, seen by the commands that run on it alone.

    What a command leaves on it is in ``kept`` afterwards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder / "disk", folder / "kept"
        self.folder.mkdir()
        self.kept.mkdir()

    def run(self, options: str, command: list[str]) -> subprocess.CompletedProcess[str]:
        head = [*UNSHARE, "sh", "-c", ON_A_DISK, "sh", options, str(self.folder), str(self.kept)]
        done = subprocess.run(
            [*head, *command], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
        )
        if done.returncode == 99:
            pytest.skip(f"nothing may be mounted here: {done.stderr}")
        return done


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"]).returncode:
        pytest.skip("no mount namespace can be made here (unshare --mount --map-root-user)")
    return Disk(tmp_path)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_run_on_a_full_disk_goes_on_when_there_is_space(
    start: Start, flags: list[str], uninterrupted: bytes, disk: Disk, tmp_path: Path
) -> None:
    measured = tmp_path / "measured"
    assert start(measured, "--save-total-limit", "9").code == 0
    room = size(measured / "checkpoints" / "checkpoint-2") // 1024
    output = disk.folder / "run"
    command = [sys.executable, str(SCRIPT), *flags, "--output", str(output)]
    filled = disk.run(f"size={int(1.6 * room)}k", command)
    assert filled.returncode == 1, filled.stderr
    kept = output / "checkpoints" / "checkpoint-2"
    assert f"the last whole checkpoint is {kept}" in filled.stderr
    assert "No space left" in filled.stderr or "iostream" in filled.stderr
    shutil.copytree(disk.kept, disk.folder, dirs_exist_ok=True)
    resumed = start(output, "--resume")
    assert resumed.code == 0, resumed.printed
    assert weights(output) == uninterrupted


SAVE = """
import sys
from st_gsinfonce import build_encoder, save_encoder
save_encoder(build_encoder(sys.argv[1], seed=0, device="cpu"), sys.argv[2])
"""


@pytest.mark.parametrize("kilobytes", [16, 128])
def test_an_encoder_on_a_full_disk_is_none(disk: Disk, tiny_bert: Path, kilobytes: int) -> None:
    folder = disk.folder / "encoder"
    command = [sys.executable, "-c", SAVE, str(tiny_bert), str(folder)]
    filled = disk.run(f"size={kilobytes}k", command)
    assert filled.returncode == 1, filled.stderr
    assert f"OSError: {folder} cannot be written" in filled.stderr.splitlines()[-1]
    assert "No space left" in filled.stderr
    assert list(disk.kept.iterdir()) == []
    assert disk.run("size=64m", command).returncode == 0  # it was for want of space
    assert (disk.kept / "encoder" / "modules.json").is_file()


def test_a_disk_that_is_read_only_is_named(flags: list[str], disk: Disk) -> None:
    output = disk.folder / "run"
    command = [sys.executable, str(SCRIPT), *flags, "--output", str(output)]
    refused = disk.run("size=64m,ro", command)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert (
        last == f"error: output_dir {output}/checkpoints cannot be written: Read-only file system"
    )


def test_a_cache_that_cannot_be_written_is_not_needed(
    flags: list[str], uninterrupted: bytes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    names = ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "MTEB_CACHE")
    environment = ENVIRONMENT | dict.fromkeys(names, str(tmp_path / "file" / "cache"))
    output = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert weights(output) == uninterrupted
