"""Sentences from files, folders, datasets or any iterable, cleaned, with a report of what was dropped."""

from __future__ import annotations

import logging
import os
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from st_gsinfonce.sources import Source, open_source

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

# A reason a row is dropped, in the order that a report lists them.
_DUPLICATE, _BLANK, _NOT_TEXT, _BROKEN = "duplicates", "blank", "not text", "broken Unicode"
_REASONS = (_DUPLICATE, _BLANK, _NOT_TEXT, _BROKEN)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Dropped:
    """Rows that were left out for one reason.

    Attributes:
        reason: "duplicates", "blank", "not text" (None, NaN, a number...) or "broken Unicode" (half of a
            surrogate pair, which no tokenizer takes).
        count: How many rows.
        first: Where the first one stands: "row 17", with the file where several were read.
        example: That row's value, shortened.
    """

    reason: str
    count: int
    first: str
    example: str


@dataclass(frozen=True)
class CorpusReport:
    """How many rows were read and what became of them.

    ``str(report)`` gives one line, ``kept 9,871 of 10,000: 103 duplicates, 20 blank, 6 not text (first: row
    17)``. The row is the first for the reason that it follows, the gravest; `dropped` has it for each.

    Attributes:
        total: The rows read. With ``max_sentences`` reading stops at the last sentence taken.
        dropped: The reasons for which rows were dropped, the most harmless first.
    """

    total: int
    dropped: tuple[Dropped, ...] = ()

    @property
    def kept(self) -> int:
        """The rows that were kept."""
        return self.total - sum(entry.count for entry in self.dropped)

    def __str__(self) -> str:
        """Return the report in one line."""
        line = f"kept {self.kept:,} of {self.total:,}"
        if self.dropped:
            counts = ", ".join(
                f"{entry.count:,} {entry.reason.removesuffix('s') if entry.count == 1 else entry.reason}"
                for entry in self.dropped
            )
            line += f": {counts} (first: {self.dropped[-1].first})"
        return line


@dataclass(frozen=True)
class Corpus:
    """Clean, distinct sentences.

    Attributes:
        sentences: The sentences in the order of the source.
        report: What was dropped on the way.
        column: The column they were read from, None for plain text (for a folder, that of its first table).
    """

    sentences: list[str]
    report: CorpusReport
    column: str | None = None


def load_sentences(
    source: str
    | os.PathLike[str]
    | Dataset
    | IterableDataset
    | Mapping[str, Dataset | IterableDataset]
    | Iterable[object],
    *,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
    encoding: str = "utf-8",
    min_sentences: int = 2,
    max_sentences: int | None = None,
) -> Corpus:
    r"""Read and clean the sentences of a source.

    Cleaning strips white space at both ends and drops rows that are blank (white space, control and format
    characters only), that aren't text, that hold broken Unicode, or whose text came before (compared after
    Unicode NFC normalisation; the first is kept as it was written). The order is kept.

    Rows of a ``.txt`` file end at ``\n`` or ``\r\n`` alone, other separators belong to the sentence. A
    ``.csv`` or ``.tsv`` file has a header row; csv cells may be quoted, in tsv a quote is a plain character.
    A ``.jsonl`` file holds an object or a string a line. Rows of these files are numbered by line (csv: the
    line where the row begins), others by position, both from 1.

    Args:
        source: A file of one of `sources.FILE_TYPES`, gzipped (``.txt.gz``) or not; a folder, whose such
            files are all read, in sorted order, subfolders and hidden files left out;
            ``"organisation/dataset"`` on the Hugging Face hub, unless a file or folder has that name; a
            ``datasets.Dataset``, ``IterableDataset`` or a dict of these by split; or any iterable of
            strings that keeps its order.
        column: The column to read. None takes the only text column there is, else ``text`` or ``sentence``
            if exactly one of these two is there, and logs which.
        split: The split of a hub dataset or dataset dict.
        config: The configuration of a hub dataset, where it has several.
        encoding: The encoding of text files. With UTF-8 a byte order mark is skipped.
        min_sentences: The fewest distinct sentences that will do, for instance one batch.
        max_sentences: Stop after this many.

    Returns:
        The sentences and the report, which is logged at level INFO as well.

    Raises:
        FileNotFoundError: No such file, or the hub dataset can't be reached.
        TypeError: The source or an argument has the wrong type.
        UnicodeError: A file isn't in the encoding given; a subclass of ValueError.
        ValueError: Everything else that is wrong with the source: an empty or binary or malformed file, an
            unknown file type, a folder with nothing to read or with a Python file, a dataset script, a
            missing or ambiguous column, fewer than ``min_sentences`` left. The message says what was
            found, where, and what to do.

    Warns:
        UserWarning: Files of a folder are left out, as they are of another type.
    """
    _check_arguments(encoding, min_sentences, max_sentences)
    name, sources = open_source(source, column, split, config, encoding)
    sentences, report = _clean(sources, max_sentences)
    if len(sentences) < min_sentences:
        raise ValueError(
            f"{name} gives {len(sentences):,} distinct sentence{'s' * (len(sentences) != 1)}, but at least "
            f"{min_sentences:,} are needed ({report}"
            + "".join(f"; {e.reason}, {e.first}: {e.example}" for e in report.dropped)
            + "); give more text or lower min_sentences and the batch size"
        )
    logger.info("%s: %s", name, report)
    for entry in report.dropped:
        logger.info("%s: %s, first %s: %s", name, entry.reason, entry.first, entry.example)
    return Corpus(sentences, report, next((s.column for s in sources if s.column), None))


def _check_arguments(encoding: str, min_sentences: int, max_sentences: int | None) -> None:
    for name, value in (("min_sentences", min_sentences), ("max_sentences", max_sentences)):
        if value is None and name == "max_sentences":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if max_sentences is not None and max_sentences < min_sentences:
        raise ValueError(
            f"max_sentences must be at least min_sentences ({min_sentences}), got {max_sentences}"
        )
    try:
        b"a".decode(encoding, "ignore")
    except LookupError as error:
        raise ValueError(f"encoding must be a text encoding that Python knows: {error}") from error


def _clean(sources: list[Source], max_sentences: int | None) -> tuple[list[str], CorpusReport]:
    kept: dict[str, str] = {}
    counts: Counter[str] = Counter()
    firsts: dict[str, tuple[str, str]] = {}
    total = 0
    for source in sources:
        if len(kept) == max_sentences:
            break
        for number, value in source.rows():
            total += 1
            reason, text = _judge(value)
            if not reason:
                # A text in normal form is its own key, at no cost in memory.
                key = unicodedata.normalize("NFC", text)
                if key not in kept:
                    kept[key] = text
                    if len(kept) == max_sentences:
                        break
                    continue
                reason = _DUPLICATE
            counts[reason] += 1
            if reason not in firsts:
                place = f"{source.label} row {number:,}".lstrip()
                firsts[reason] = place, reprlib.repr(value)
    dropped = tuple(Dropped(r, counts[r], *firsts[r]) for r in _REASONS if r in counts)
    return list(kept.values()), CorpusReport(total, dropped)


def _judge(value: object) -> tuple[str, str]:
    """Return why the value can't be a sentence ("" if it can) and its stripped text."""
    if not isinstance(value, str):
        return _NOT_TEXT, ""
    text = value.strip()
    if not text.isascii() and _SURROGATE.search(text):
        return _BROKEN, ""
    if not any(c.isalnum() or unicodedata.category(c)[0] not in "ZC" for c in text):
        return _BLANK, ""
    return "", text
