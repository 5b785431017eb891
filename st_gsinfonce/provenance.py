"""Where and with what a number was made, to be kept beside it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "st_gsinfonce",
    "sentence-transformers",
    "transformers",
    "torch",
    "datasets",
    "mteb",
    "numpy",
)


def describe_run() -> dict[str, Any]:
    """Return the command, date, versions and hardware of this process, ready for JSON.

    The command is what the user typed after ``python``, less tokens; no user, host or folder is added to it.
    """
    return {
        "command": shlex.join(["python", *_without_tokens(sys.argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **package_versions()},
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def _without_tokens(words: list[str]) -> list[str]:
    shown = []
    for before, word in pairwise(["", *words]):
        word = re.sub(r"hf_\w{8,}", "<TOKEN>", word)
        word = re.sub(r"^(--[\w-]*token)=.*", r"\1=<TOKEN>", word, flags=re.DOTALL)
        shown.append("<TOKEN>" if re.fullmatch(r"--[\w-]*token", before) else word)
    return shown


def package_versions() -> dict[str, str]:
    """Return the versions of the libraries that have a part in our numbers, those installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # an optional one
            continue
    return found


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
