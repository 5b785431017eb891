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
    """Run a script; what its user can set right, or stops, ends with a line that says so, no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    try:
        main()
    except _USERS_ERRORS as error:
        sys.exit(_with_notes(f"error: {error}", error))
    except KeyboardInterrupt as interrupt:
        print(_with_notes("interrupted", interrupt), file=sys.stderr)
        sys.exit(130)


def _with_notes(line: str, error: BaseException) -> str:
    notes = getattr(error, "__notes__", [])  # what to do, where it is known
    return "\n".join([line, *notes])
