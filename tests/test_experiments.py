"""Grids of paired runs.

- Arms of one seed see the same batches and start from the same head; arms of equal dropout drop the same
  units at every step, with noise or without.
- A cell is run once, whoever needs it; a finished one is kept as it is; a damaged one is run again.
- No reader ever meets half a result.
- A grid that is killed in the middle of a cell ends, started again, with the numbers of one never killed.
- No cell is run by two processes at once, and a dead process holds nothing.
- A result names no folder of the machine.
- Workers end with the grid that started them; progress counts the steps of a cell.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_gsinfonce import STS_TASKS, experiments
from st_gsinfonce.cells import Arm, Cell, CellResult
from st_gsinfonce.experiments import read_result, run_cell, run_grid
from st_gsinfonce.materials import (
    GridOptions,
    Materials,
    setting_of,
)
from st_gsinfonce.report import GridReport
from st_gsinfonce.whole_files import write_atomically

EXAMPLES = Path(__file__).parent.parent / "examples"
ARMS = [Arm.parse(text) for text in ("infonce", "sampled", "expected:b=10", "sampled:b=10")]
WIDE = [Arm(dropout=0.3), Arm("expected", 3.0, dropout=0.3)]

pytestmark = pytest.mark.filterwarnings("ignore:.*has .* pairs:UserWarning")  # a made-up STS set


@pytest.fixture
def quick(loaded: Materials) -> Materials:
    """The materials with a score that costs nothing and tells weights apart."""

    def score(model: SentenceTransformer) -> dict[str, float]:
        return {"Avg.": float(model.encode(["the cat sees the dog"])[0, 0])}

    return replace(loaded, score=score)


class Watch:
    """Records what a training starts from and sees: the head, the batches, which units are dropped."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.head = model[2].linear.weight.detach().clone()
        self.batches: list[list[int]] = []
        self.masks = hashlib.sha256()
        model[0].register_forward_pre_hook(self.see_batch)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(self.see_mask)

    def see_batch(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.batches.append(inputs[0]["input_ids"].flatten().tolist())

    def see_mask(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            self.masks.update((output == 0).numpy().tobytes())


@pytest.mark.slow
def test_arms_of_a_seed_are_paired(
    grid_options: GridOptions, quick: Materials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: trains a cell for every arm."""
    build = experiments.build_encoder
    watches: list[Watch] = []

    def watched(*args: Any, **kwargs: Any) -> SentenceTransformer:
        model = build(*args, **kwargs)
        watches.append(Watch(model))
        return model

    monkeypatch.setattr(experiments, "build_encoder", watched)
    setting = setting_of(grid_options, quick)
    seen: dict[tuple[Arm, int], Watch] = {}
    results = {}
    for seed in (0, 1):
        for arm in [*ARMS, *WIDE]:
            results[arm, seed] = run_cell(Cell(arm, seed, setting), quick)
            seen[arm, seed] = watches[-1]
    first = seen[ARMS[0], 0]
    assert len(first.batches) == 5  # 70 sentences by 16, the last batch incomplete
    for (_, seed), watch in seen.items():
        assert (watch.batches == first.batches) == (seed == 0)
        assert torch.equal(watch.head, first.head) == (seed == 0)
    for arms in (ARMS, WIDE):
        for seed in (0, 1):
            assert len({seen[arm, seed].masks.hexdigest() for arm in arms}) == 1
    different = [seen[arm, seed].masks.hexdigest() for arm in (ARMS[0], WIDE[0]) for seed in (0, 1)]
    assert len(set(different)) == 4
    # They are different trainings nevertheless, and each can be repeated.
    assert len({result.weights_sha256 for result in results.values()}) == len(results)
    again = run_cell(Cell(ARMS[1], 0, setting), quick)
    assert again.weights_sha256 == results[ARMS[1], 0].weights_sha256
    assert again.scores == results[ARMS[1], 0].scores


def test_a_cell_holds_what_a_reader_needs(
    grid_options: GridOptions,
    loaded: Materials,
    tiny_bert: Path,
    corpus_of_70: Path,
    sts_tasks: Path,
) -> None:
    grid_options.epochs = 6
    cell = Cell(Arm("sampled", 3.0), 0, setting_of(grid_options, loaded))
    result = run_cell(cell, loaded)
    assert set(result.scores) == {"STS-B dev", *STS_TASKS, "Avg."}
    assert result.scores["Avg."] == pytest.approx(sum(result.scores[t] for t in STS_TASKS) / 7)
    assert all(-100 <= score <= 100 for score in result.scores.values())
    assert max(map(abs, result.scores.values())) > 1  # points
    assert result.steps == 30 and list(result.dev) == list(range(2, 31, 2))
    assert result.dev[30] == pytest.approx(
        result.scores["STS-B dev"]
    )  # final step: the same weights
    assert list(result.losses) == [25] and result.losses[25] > 0
    assert 0 < result.statistics["noise_share"] < 1
    assert result.log_mass == pytest.approx(cell.arm.mass(32, 16))
    assert result.run["versions"]["torch"] and result.run["hardware"]["cores"]
    assert len(result.weights_sha256) == 64
    text = result.to_json()
    assert CellResult.from_json(text) == result
    for path in (
        tiny_bert.parent,
        corpus_of_70.parent,
        sts_tasks,
        Path.home(),
        Path(grid_options.output),
    ):
        assert str(path) not in text.replace(json.dumps(result.run["command"]), "")
    assert result.cell.setting.corpus.name == "corpus.txt"
    assert result.cell.setting.encoder.name == tiny_bert.name


def test_a_last_batch_of_one_sentence_is_no_obstacle(
    grid_options: GridOptions, quick: Materials, tmp_path: Path
) -> None:
    grid_options.batch_size = 23  # of 70 sentences
    cell = Cell(Arm("sampled", 3.0), 0, setting_of(grid_options, quick))
    result = run_grid([cell], grid_options, quick, tmp_path)[cell]
    assert result.steps == 4 and result.statistics["noise_share"] > 0
    assert "negative_cosine" not in result.statistics  # there was no other candidate


def test_a_renamed_corpus_changes_nothing(
    grid_options: GridOptions, quick: Materials, counted: list[Cell], tmp_path: Path
) -> None:
    grid_options.max_steps = 2
    renamed = replace(quick, corpus=replace(quick.corpus, name="other.txt"))
    first, second = (
        [Cell(arm, 0, setting_of(grid_options, each)) for arm in ARMS[:count]]
        for each, count in ((quick, 1), (renamed, 2))
    )
    run_grid(first, grid_options, quick, tmp_path)
    results = run_grid(second, grid_options, renamed, tmp_path)
    assert len(counted) == 2
    assert len(GridReport(results.values()).arms) == 2  # one setting


@pytest.mark.slow
def test_the_best_weights_are_scored_if_asked_for(
    grid_options: GridOptions, loaded: Materials
) -> None:
    """Slow: three epochs, scored step by step."""
    grid_options.epochs, grid_options.select, grid_options.learning_rate = 3, "best", 3e-2
    result = run_cell(Cell(Arm(), 0, setting_of(grid_options, loaded)), loaded)
    best = max(result.dev, key=lambda step: result.dev[step])
    assert result.best_step == best
    assert best < max(result.dev), "the last step must not be the best for this test to tell"
    assert result.scores["STS-B dev"] == pytest.approx(result.dev[best])
    final = replace(result.cell, setting=replace(result.cell.setting, select="final"))
    assert run_cell(final, loaded).weights_sha256 != result.weights_sha256


def test_other_materials_are_refused(grid_options: GridOptions, quick: Materials) -> None:
    cell = Cell(Arm(), 0, setting_of(grid_options, quick))
    other = replace(quick, corpus=replace(quick.corpus, sha256="0" * 64))
    with pytest.raises(ValueError, match="the cell's corpus is .*corpus.txt"):
        run_cell(cell, other)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that are really run."""
    ran: list[Cell] = []
    run = experiments.run_cell

    def count(cell: Cell, *args: Any) -> CellResult:
        ran.append(cell)
        return run(cell, *args)

    monkeypatch.setattr(experiments, "run_cell", count)
    return ran


def test_a_cell_is_run_once(
    grid_options: GridOptions, quick: Materials, counted: list[Cell], tmp_path: Path
) -> None:
    grid_options.max_steps = 2
    setting = setting_of(grid_options, quick)
    first = [Cell(arm, 0, setting) for arm in ARMS[:2]]
    results = run_grid([*first, first[0]], grid_options, quick, tmp_path / "cells")
    assert list(results) == first == counted
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert sorted(path.name for path in files) == sorted(cell.file_name for cell in first)
    second = [Cell(arm, 0, setting) for arm in ARMS[:3]]
    more = run_grid(second, grid_options, quick, tmp_path / "cells")
    assert counted == second  # one more, and the first two not again
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert more[first[0]] == results[first[0]]


@pytest.mark.parametrize("damage", ["", '{"key": "', "[]\n"])
def test_a_damaged_result_is_run_again(
    damage: str, grid_options: GridOptions, quick: Materials, counted: list[Cell], tmp_path: Path
) -> None:
    grid_options.max_steps = 2
    cell = Cell(Arm(), 0, setting_of(grid_options, quick))
    whole = run_grid([cell], grid_options, quick, tmp_path)[cell]
    path = tmp_path / cell.file_name
    path.write_text(damage, encoding="utf-8")
    with pytest.warns(UserWarning, match="is damaged, the cell is run again"):
        repaired = run_grid([cell], grid_options, quick, tmp_path)[cell]
    assert len(counted) == 2
    assert repaired.scores == whole.scores and repaired.weights_sha256 == whole.weights_sha256
    assert read_result(cell, tmp_path) == repaired


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cell.json"
    write_atomically(path, "old")

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk is full"):
            write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failing_cell_leaves_nothing_that_blocks(
    grid_options: GridOptions, quick: Materials, tmp_path: Path
) -> None:
    grid_options.max_steps = 2
    cell = Cell(Arm(), 0, setting_of(grid_options, quick))

    def fail(model: SentenceTransformer) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_grid([cell], grid_options, replace(quick, score=fail), tmp_path)
    assert caught.value.__notes__ == [
        f"finished runs are kept in {tmp_path}: the same command goes on from them"
    ]
    assert read_result(cell, tmp_path) is None
    assert run_grid([cell], grid_options, quick, tmp_path)[cell].scores
    assert [path.name for path in tmp_path.iterdir()] == [cell.file_name]


def test_what_another_process_runs_is_waited_for(
    grid_options: GridOptions,
    quick: Materials,
    counted: list[Cell],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experiments, "_POLL_SECONDS", 0.05)
    grid_options.max_steps = 2
    setting = setting_of(grid_options, quick)
    mine, theirs = Cell(Arm(), 0, setting), Cell(Arm(), 1, setting)
    made = run_cell(theirs, quick)
    counted.clear()
    held = threading.Event()

    def other_process() -> None:
        with FileLock(tmp_path / f".{theirs.file_name}.lock"):
            held.set()
            while not (tmp_path / mine.file_name).exists():
                time.sleep(0.02)
            time.sleep(0.3)
            write_atomically(tmp_path / theirs.file_name, made.to_json())

    thread = threading.Thread(target=other_process)
    thread.start()
    held.wait()
    results = run_grid([theirs, mine], grid_options, quick, tmp_path)
    thread.join()
    assert counted == [mine]
    assert results[theirs] == made and results[mine].scores


HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_dead_process_holds_nothing(
    grid_options: GridOptions, quick: Materials, counted: list[Cell], tmp_path: Path
) -> None:
    grid_options.max_steps = 2
    cell = Cell(Arm(), 0, setting_of(grid_options, quick))
    lock = tmp_path / f".{cell.file_name}.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with experiments._claim(cell, tmp_path) as claimed:
            assert not claimed
        holder.send_signal(signal.SIGKILL)
    assert lock.exists()  # its claim is still there, and stale
    run_grid([cell], grid_options, quick, tmp_path)
    assert counted == [cell] and not lock.exists()


def command(grid_options: GridOptions, output: Path, steps: int) -> list[str]:
    flags = {
        "model": grid_options.model,
        "corpus": grid_options.corpus,
        "sts_data": grid_options.sts_data,
        "output": output,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "precision": "fp32",
        "eval_steps": 10,
        "max_steps": steps,
        "seeds": "0-1",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [
        sys.executable,
        str(EXAMPLES / "compare_losses.py"),
        *words,
        "--arms",
        "infonce",
        "sampled",
    ]


def numbers(folder: Path) -> dict[str, Any]:
    """Everything of a grid's results but times, dates and commands."""
    found = {}
    for path in sorted((folder / "cells").glob("*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        del values["seconds"], values["run"]
        found[path.name] = values
    return found


@pytest.mark.slow  # three processes, each of which imports everything anew
def test_a_killed_grid_ends_as_one_never_killed(
    grid_options: GridOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # another number of threads, another rounding
    steps = 60
    run: Callable[[Path], list[str]] = lambda output: command(grid_options, output, steps)  # noqa: E731
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    reference = subprocess.Popen(run(straight), stdout=subprocess.PIPE, text=True)
    killed = subprocess.Popen(run(broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cells = broken / "cells"
    deadline = time.monotonic() + 300
    while True:  # until the second of four cells is being trained
        assert time.monotonic() < deadline and killed.poll() is None
        finished = list(cells.glob("*.json")) if cells.exists() else []
        claims = list(cells.glob(".*.lock")) if cells.exists() else []
        if len(finished) == 1 and any(finished[0].name not in claim.name for claim in claims):
            break
        time.sleep(0.005)
    time.sleep(0.2)
    killed.kill()
    killed.wait()
    kept = {path: path.read_bytes() for path in cells.glob("*.json")}
    assert len(kept) == 1 and list(cells.glob(".*.lock"))  # in the middle of a cell
    assert [path.is_dir() for path in cells.glob(".*.json-*")] == [True]  # its checkpoints' folder
    resumed = subprocess.run(run(broken), capture_output=True, text=True, check=True)
    printed = reference.communicate()[0]
    assert reference.returncode == 0
    assert numbers(broken) == numbers(straight) and len(numbers(broken)) == 4
    assert all(path.read_bytes() == content for path, content in kept.items())
    tables = [text.partition("Hardware")[0] for text in (printed, resumed.stdout)]
    assert tables[0] == tables[1] and "| InfoNCE, dropout 0.1 | 2 |" in tables[0]
    assert sorted(path.suffix for path in cells.iterdir()) == [".json"] * 4


@dataclass
class ScriptOptions(GridOptions):
    """Options as a script has them: some are its own."""

    sweep: str = "both"


@pytest.mark.slow  # two worker processes, each of which imports everything anew
def test_workers_give_the_same_numbers(
    grid_options: GridOptions, loaded: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    grid_options.max_steps = 3
    setting = setting_of(grid_options, loaded)
    cells = [Cell(arm, seed, setting) for seed in (0, 1) for arm in ARMS[:2]]
    here = run_grid(cells, grid_options, loaded, tmp_path / "here")
    script = ScriptOptions(**asdict(grid_options) | {"devices": "cpu,cpu"})
    there = run_grid(cells, script, loaded, tmp_path / "there")
    assert list(there) == cells
    for cell in cells:
        assert there[cell].scores == here[cell].scores
        assert there[cell].weights_sha256 == here[cell].weights_sha256
        assert there[cell].run["command"] == here[cell].run["command"]  # what the user typed
    assert len(list((tmp_path / "there").iterdir())) == len(cells)


@pytest.mark.slow  # three processes, each of which imports everything anew
def test_workers_end_with_a_killed_grid(grid_options: GridOptions, tmp_path: Path) -> None:
    words = [*command(grid_options, tmp_path, 100_000), "--devices", "cpu,cpu"]
    grid = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(locks := list((tmp_path / "cells").glob(".*.lock"))) < 2:  # two cells are trained
        assert time.monotonic() < deadline and grid.poll() is None
        time.sleep(0.05)
    grid.kill()
    grid.wait()
    for lock in locks:
        with FileLock(lock, timeout=60):  # who held it is gone
            pass


def test_progress_counts_steps_and_tells_the_time_left(
    grid_options: GridOptions, quick: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of(grid_options, quick)
    cells = [Cell(arm, 0, setting) for arm in ARMS[:2]]
    made = {cell: run_cell(cell, quick) for cell in cells}
    seen: list[tuple[float, str]] = []

    def run(cell: Cell, _: Materials, on_step: experiments.OnStep, *rest: Any) -> CellResult:
        for step in (1, 2, 3, 4):
            time.sleep(0.01)
            on_step(step, 4)
            seen.append((bar.n, str(bar)))
        return made[cell]

    monkeypatch.setattr(experiments, "run_cell", run)
    with experiments.progress(3, done=1) as bar:
        experiments._work(cells, quick, tmp_path, bar)
    assert [n for n, _ in seen] == [1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3]
    assert "1.2/3 runs" in seen[0][1] and "<00:00" in seen[0][1] and "step 1/4" in seen[0][1]
    assert "scoring" in seen[3][1] and bar.n == 3


@pytest.mark.slow  # a worker process, which imports everything anew
def test_a_failing_worker_is_named(
    grid_options: GridOptions, quick: Materials, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = Cell(Arm(), 0, setting_of(grid_options, quick))
    grid_options.devices, grid_options.corpus = "cpu", str(tmp_path / "absent.txt")
    with pytest.raises(RuntimeError, match="the worker on cpu failed with status 1, see above"):
        run_grid([cell], grid_options, quick, tmp_path / "cells")
    assert "absent.txt" in capfd.readouterr().err


def test_a_dead_worker_whose_runs_others_did_is_no_failure(
    grid_options: GridOptions, quick: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid_options.max_steps, grid_options.devices = 2, "cpu"
    cell = Cell(Arm(), 0, setting_of(grid_options, quick))
    made = run_cell(cell, quick)

    class Killed:
        returncode = -9

        def __enter__(self) -> Killed:
            write_atomically(tmp_path / cell.file_name, made.to_json())
            return self

        def __exit__(self, *_: object) -> None: ...

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(experiments, "_start_worker", lambda *_: Killed())
    with pytest.warns(UserWarning, match="worker on cpu failed with status -9; the others did"):
        assert run_grid([cell], grid_options, quick, tmp_path) == {cell: made}


def test_a_worker_sees_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    class Process:
        def __init__(self, *_: Any, env: dict[str, str], **kwargs: Any) -> None:
            seen.append(env)
            self.stdin = open(os.devnull, "w")  # noqa: SIM115

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    experiments._start_worker("cuda:1", 2, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    experiments._start_worker("cuda:1", 2, "")
    experiments._start_worker("cpu", 2, "")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["1", "5", ""]
    assert "OMP_NUM_THREADS" not in seen[0]
    assert int(seen[2]["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 2)
