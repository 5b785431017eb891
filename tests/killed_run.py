"""Run a script that trains, each time in a fork of this process, and kill it at a moment that is named.

A line of standard input is one run: ``{"script": PATH, "arguments": [...], "log": PATH, "moment": NAME,
"signal": NAME}``. Without a moment it runs to its end. The answer is a line with its exit status, negative
for a signal; what it printed is in the log. Everything is imported before the first fork, once.

A moment is a sequence of Python's audit events, each with a text that its arguments hold; with the last of
them the process signals itself. What happens without such an event announces one here.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOMENTS: dict[str, list[tuple[str, str]]] = {
    "loading the sentences": [("open", "corpus.txt")],
    "keeping the settings": [("os.rename", "run.json")],
    "tokenizing the first batch": [("tokenize", "")],
    "in the first step": [("step", "")],
    "in the step before the first save": [("step", "")] * 2,
    "in the first evaluation": [("evaluate", "")] * 2,  # one comes before the training
    "in the first checkpoint": [("open", "checkpoint-2/modules.json")],
    "in the second evaluation": [("evaluate", "")] * 3,
    "saving the weights": [("open", "checkpoint-4/modules.json")],
    "saving the optimizer": [("half saved", "checkpoint-4/optimizer.pt")],
    "saving the state": [("open", "checkpoint-4/trainer_state.json")],
    "marking the best": [("os.rename", "checkpoint-4/weights.sha256")],
    "deleting an old checkpoint": [("shutil.rmtree", "checkpoint-"), *[("os.remove", "")] * 3],
    "loading the best": [("os.rename", "checkpoint-8/weights.sha256"), ("open", "modules.json")],
    "writing the card": [("open", ".partial/whole/README.md")],
    "saving the encoder": [("open", ".partial/whole/modules.json")],
    "giving the encoder its name": [("os.rename", ".partial/whole")],
}


def announce(owner: Any, name: str, event: str) -> None:
    """Make a function of a class or module say when it is called."""
    original = getattr(owner, name)

    def announced(*args: Any, **kwargs: Any) -> Any:
        sys.audit(event)
        return original(*args, **kwargs)

    setattr(owner, name, announced)


def announce_everything() -> None:
    import torch

    from st_gsinfonce import SimCSEDataCollator, STSEvaluator
    from st_gsinfonce.faults import CarefulTrainer

    announce(SimCSEDataCollator, "__call__", "tokenize")
    announce(CarefulTrainer, "training_step", "step")
    announce(STSEvaluator, "__call__", "evaluate")
    save = torch.save

    def save_in_halves(thing: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        Path(file).write_bytes(b"half an optimizer")
        sys.audit("half saved", file)
        save(thing, file, *args, **kwargs)

    torch.save = save_in_halves


def kill_at(moment: list[tuple[str, str]], number: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that sends this process a signal at a moment."""
    left = list(moment)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if left and event == left[0][0] and any(left[0][1] in str(part) for part in args or [""]):
            del left[0]
            if not left:
                os.kill(os.getpid(), number)

    return hook


def run(order: dict[str, Any]) -> int:
    """Run the script in this process, and return its exit status."""
    with open(order["log"], "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = [order["script"], *order["arguments"]]
    if order["moment"]:
        announce_everything()
        number = int(signal.Signals[order["signal"]])
        sys.addaudithook(kill_at(MOMENTS[order["moment"]], number))
    try:
        runpy.run_path(order["script"], run_name="__main__")
        return 0
    except SystemExit as end:
        print(end.code, file=sys.stderr)
        return 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    import mteb  # noqa: F401

    import st_gsinfonce  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            os._exit(run(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
