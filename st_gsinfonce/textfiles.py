"""Text files, plain or gzipped, opened so that what is wrong with them is said by file and line."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_MAGIC = re.compile(
    rb"\x1f\x8b|PK\x03\x04|PAR1|ARROW1|%PDF-|\x89PNG|\xff\xd8\xff|\x7fELF|SQLite format 3|\x93NUMPY"
)
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x80-\xff]")
EMPTY = "{} is empty; give a file with sentences"
_MAX_NULS = 0.2  # share of NUL bytes from which a file isn't text


@contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked, and name it in what goes wrong while it is unpacked."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a broken gzip file: {error}") from error


@contextmanager
def open_text(path: Path, encoding: str, newline: str) -> Iterator[IO[str]]:
    """Open a text file, and name the file and line of what can't be decoded while it is read."""
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"
    try:
        with _open_bytes(path) as stream:
            yield io.TextIOWrapper(stream, encoding=encoding, newline=newline)
    except UnicodeDecodeError as error:
        raise UnicodeError(
            f"{path} isn't {encoding.removesuffix('-sig')} text: {_locate(path, encoding)}; say which "
            'encoding it has, for instance encoding="cp1252", or save it as UTF-8'
        ) from error


def _locate(path: Path, encoding: str) -> str:
    """Return where the first byte stands that can't be decoded."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    with _open_bytes(path) as stream:
        while True:
            chunk = stream.read(1 << 16)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                return f"byte 0x{error.object[error.start]:02x} in line {line:,}"
            if not chunk:
                return f"near line {line:,}"
            line += chunk.count(b"\n")


def check_text(path: Path, encoding: str) -> None:
    """Raise ValueError for a file that is empty or isn't text."""
    with _open_bytes(path) as stream:
        head = stream.read(4096)
    if not head:
        raise ValueError(EMPTY.format(path))
    if "a".encode(encoding) != b"a":
        return  # UTF-16 and its like: there NUL bytes are ordinary
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnicodeError(f'{path} begins as UTF-16 text does; pass encoding="utf-16"')
    magic = _MAGIC.match(head)
    if magic and _NO_TEXT.search(head) or head.count(0) >= _MAX_NULS * len(head):
        signs = f"it begins with {magic[0]!r}" if magic else "many NUL bytes"
        raise ValueError(
            f"{path} is binary ({signs}), not text; give text, or its encoding= if it is text in an "
            "encoding such as utf-16-le"
        )
