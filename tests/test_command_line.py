"""What the scripts' command lines have in common.

- The help shows the description line by line, and every default.
- A flag's beginning is not taken for it.
- Errors that a user can set right end with a line; a mistake of the program's own with its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from st_gsinfonce.command_line import parser_of, run


@dataclass
class Options:
    """Of a script."""

    learning_rate: float = field(default=3e-5, metadata={"help": "At the first step."})


def test_the_help_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parser_of(Options, "Train.\n\n    one command\n    another").parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "Train.\n\n    one command\n    another\n" in shown
    assert "At the first step. (default: 3e-05)" in shown


def test_a_flag_s_beginning_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of(Options, None)
    (options,) = parser.parse_args_into_dataclasses(["--learning-rate", "1"])
    assert options.learning_rate == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--learning", "1"])


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, ImportError, RuntimeError])
def test_an_error_of_the_user_s_ends_with_its_line(kind: type[Exception]) -> None:
    def main() -> None:
        error = kind("--corpus is missing")
        error.add_note("give a file")
        raise error

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == "error: --corpus is missing\ngive a file"


def test_an_interrupted_script_says_what_its_library_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        interrupt = KeyboardInterrupt()
        interrupt.add_note("finished runs are kept")
        raise interrupt

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\nfinished runs are kept\n"


def test_a_mistake_of_the_program_s_own_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
