"""What the command lines of the scripts have in common: a readable help, and errors in one line."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError
from transformers import HfArgumentParser

# What wrong arguments, files and networks raise, here and in the libraries.
_USERS_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Leaves the description's lines as they are, and shows defaults."""


def parser_of(options: Any, description: str | None) -> HfArgumentParser:
    """Return a parser of dataclasses that takes no flag for another.

    Args:
        options: A dataclass, or several; a field's help is its metadata's "help".
        description: A script's docstring, shown as it is.
    """
    return HfArgumentParser(
        options, description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )


def run(main: Callable[[], object]) -> None:
    """Run a script: what its user can set right ends it with a line that says what, not a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    try:
        main()
    except _USERS_ERRORS as error:
        notes = getattr(error, "__notes__", [])  # what to do, where a library knows
        sys.exit("\n".join([f"error: {error}", *notes]))
