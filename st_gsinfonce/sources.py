"""Where sentences come from: opens files, folders, datasets or iterables, chooses the column, reads rows.

Nothing is judged or cleaned here, and nothing executable is loaded.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from st_gsinfonce.textfiles import EMPTY, check_text, open_text

logger = logging.getLogger(__name__)

FILE_TYPES = (".txt", ".csv", ".tsv", ".jsonl", ".parquet")
"""The files that are read; all but parquet may be gzipped (``.txt.gz``)."""

WIKI1M = "princeton-nlp/datasets-for-simcse"
"""The hub dataset with the million sentences of Wikipedia that SimCSE and its successors train on."""

# Where the sentences are in a dataset of several kinds of files, of which `datasets` would choose one.
_SENTENCES_OF = {WIKI1M: "wiki1m_for_simcse.txt"}

# Columns that are taken unasked where exactly one of them is there among several.
_USUAL_COLUMNS = ("text", "sentence")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_STRING_TYPES = ("string", "large_string", "string_view")
_ALLOWED = ", ".join(FILE_TYPES)
_MAX_CELL = 2**31 - 1  # the most that csv takes on every platform
_MAX_NAME_WORDS = 3  # a lone column name with more is a sentence: the header row is missing
_BATCH = 1000

Rows = Iterator[tuple[int, object]]
"""The number of each row, from 1, and its value."""


@dataclass(frozen=True)
class Source:
    """One file or dataset with its column chosen.

    Attributes:
        name: What it is, for messages.
        rows: Opens it and yields its rows.
        column: The column that is read, None for plain text.
        label: The file's name where several are read, else "".
    """

    name: str
    rows: Callable[[], Rows]
    column: str | None = None
    label: str = ""


@dataclass(frozen=True)
class _Table:
    """Named columns, those that hold text, and how to read one."""

    columns: list[str]
    text_columns: list[str]
    rows: Callable[[str], Rows]


def open_source(
    source: object, column: str | None, split: str, config: str | None, encoding: str
) -> tuple[str, list[Source]]:
    """Return a name for the source and its parts, columns chosen."""
    if isinstance(source, str | os.PathLike):
        if not str(source).strip():
            raise ValueError(f"source must be a path or a hub dataset, got {source!r}")
        path = Path(source).expanduser()
        if os.path.isdir(path):
            return str(path), _open_folder(path, column, encoding)
        if os.path.exists(path):
            return str(path), [_open_file(path, column, encoding)]
        if isinstance(source, str) and _HUB_NAME.fullmatch(source) and not _suffix(path):
            name = f"the hub dataset {source}"
            dataset = _load_from_hub(source, config, split)
            return name, [_choose(name, _dataset_table(dataset), column)]
        raise FileNotFoundError(
            f"no such file or folder: {source!r}; give a path, organisation/dataset for a dataset on "
            "the hub, or a list of sentences"
        )
    name = f"the {type(source).__name__} given"
    if isinstance(source, Mapping) and all(map(_is_dataset, source.values())) and source:
        if split not in source:
            raise ValueError(f"{name} has no split {split!r}; its splits are {_listed(source)}")
        source = source[split]
    if _is_dataset(source):
        return name, [_choose(name, _dataset_table(source), column)]
    is_table = hasattr(source, "columns")  # a data frame iterates over its column names
    wrong = is_table or isinstance(source, bytes | bytearray | Mapping | Set)
    if wrong or not isinstance(source, Iterable):
        raise TypeError(
            "source must be a path, a hub dataset's name, a datasets.Dataset or an iterable of strings in "
            f"a fixed order (a list or a data frame's column; no set or dict), got {type(source).__name__}"
        )
    if column is not None:
        raise ValueError(f"{name} has no columns, so column={column!r} can't be read from it")
    values = source
    return name, [Source(name, lambda: enumerate(values, 1))]


def _open_folder(folder: Path, column: str | None, encoding: str) -> list[Source]:
    files = sorted(
        p
        for p in folder.iterdir()
        # A link to nothing is an error when it is opened, not less to train on.
        if not p.name.startswith(".") and (p.is_file() or (p.is_symlink() and not p.exists()))
    )
    for path in files:
        if path.suffix == ".py":
            raise ValueError(
                f"{folder} holds a script ({path.name}), which may define how its data is read; scripts "
                "are never run: give the data files by name or move them to a folder without it"
            )
    usable = [path for path in files if _suffix(path)]
    if not usable:
        found = f"only {_listed(p.name for p in files)}" if files else "no file"
        raise ValueError(f"the folder {folder} holds {found}; readable are {_ALLOWED}")
    if left_out := [path.name for path in files if path not in usable]:
        warnings.warn(
            f"{folder}: left out are {_listed(left_out)}; readable are {_ALLOWED}", stacklevel=4
        )
    several = len(usable) > 1
    return [_open_file(p, column, encoding, label=p.name if several else "") for p in usable]


def _open_file(path: Path, column: str | None, encoding: str, label: str = "") -> Source:
    suffix = _suffix(path)
    if path.suffix == ".py":
        raise ValueError(
            f"{path} is a script; scripts are never run: give a data file ({_ALLOWED})"
        )
    if not suffix:
        raise ValueError(
            f"{path} has an unknown file type ({path.suffix or 'no ending'}); readable are {_ALLOWED}"
        )
    if not path.is_file():
        raise ValueError(f"{path} is neither a regular file nor a folder")
    if not path.stat().st_size:
        raise ValueError(EMPTY.format(path))
    if suffix == ".parquet":
        return _choose(str(path), _parquet_table(path), column, label)
    check_text(path, encoding)
    if suffix in (".csv", ".tsv"):
        return _choose(str(path), _csv_table(path, encoding, suffix, column), column, label)
    if suffix == ".jsonl":
        table = _jsonl_table(path, encoding, column)
        if table.columns:
            return _choose(str(path), table, column, label)
    if column is not None:
        raise ValueError(f"{path} has no columns, so column={column!r} can't be read from it")
    lines = _json_values if suffix == ".jsonl" else _lines
    return Source(str(path), lambda: lines(path, encoding), label=label)


def _choose(name: str, table: _Table, column: str | None, label: str = "") -> Source:
    """Return the table as a source of its one text column, or of the column asked for."""
    if column is None:
        usual = [c for c in _USUAL_COLUMNS if c in table.text_columns]
        choice = table.text_columns if len(table.text_columns) == 1 else usual
        if len(choice) != 1:
            kind = "several text columns" if table.text_columns else "no text column"
            raise ValueError(
                f"{name} has {kind} (its columns: {_listed(table.columns)}); say which to read with column="
            )
        column = choice[0]
        # A column of another name was taken for want of others, and may be a sentence for want of a header.
        level = logging.INFO if column in _USUAL_COLUMNS else logging.WARNING
        logger.log(level, "%s: reading column %r", name, column)
    elif column not in table.columns:
        raise ValueError(
            f"{name} has no column {column!r}; its columns are {_listed(table.columns)}"
        )
    chosen = column
    return Source(name, lambda: table.rows(chosen), chosen, label)


def _suffix(path: Path) -> str:
    """Return the file type by the name's ending, "" for one that isn't read."""
    name = path.name.lower()
    plain = name.removesuffix(".gz")
    suffix = Path(plain).suffix
    return suffix if suffix in FILE_TYPES and (plain == name or suffix != ".parquet") else ""


def _listed(names: Iterable[object]) -> str:
    names = list(names)
    return ", ".join(map(str, names[:20])) + ", ..." * (len(names) > 20) if names else "none"


# Text files


def _lines(path: Path, encoding: str) -> Rows:
    with open_text(path, encoding, newline="\n") as stream:
        yield from enumerate(stream, 1)


def _csv_table(path: Path, encoding: str, suffix: str, column: str | None) -> _Table:
    _, cells = next(_csv_rows(path, encoding, suffix), (1, []))
    header = [cell.strip() for cell in cells]
    if not any(header):
        raise ValueError(f"{path} has no header row: its first line must name the columns")
    if len(set(header)) < len(header):
        raise ValueError(f"{path} names a column twice in its header row: {_listed(header)}")
    if len(header) == 1 and len(header[0].split()) > _MAX_NAME_WORDS and column is None:
        raise ValueError(
            f"{path} seems to lack a header row: its first line is {header[0]!r}; add one, pass that as "
            "column=, or save one sentence a line as .txt"
        )

    def rows(column: str) -> Rows:
        index = header.index(column)
        body = _csv_rows(path, encoding, suffix)
        next(body)
        for number, cells in body:
            if len(cells) > len(header):
                raise ValueError(
                    f"{path}, row {number:,} has {len(cells)} cells, its header {len(header)}; quote cells "
                    "that hold a separator, or save one sentence a line as .txt"
                )
            # An empty line is blank, a line too short lacks the cell.
            yield number, (cells[index] if index < len(cells) else None) if cells else ""

    return _Table(header, header, rows)


def _csv_rows(path: Path, encoding: str, suffix: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line where each row begins, and its cells."""
    tabs = suffix == ".tsv"
    before = csv.field_size_limit(_MAX_CELL)
    try:
        with open_text(path, encoding, newline="") as stream:
            reader = csv.reader(
                stream,
                delimiter="\t" if tabs else ",",
                quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
                strict=True,
            )
            number = 1
            try:
                for cells in reader:
                    yield number, cells
                    number = reader.line_num + 1
            except csv.Error as error:
                raise ValueError(
                    f"{path}, row {number:,} is malformed: {error}; a quote inside a quoted cell is doubled, "
                    "and every quoted cell must end"
                ) from error
    finally:
        csv.field_size_limit(before)


def _jsonl_table(path: Path, encoding: str, column: str | None) -> _Table:
    columns: dict[str, object] = {}
    for _, value in _json_values(path, encoding):
        if isinstance(value, dict):
            columns = {**value, **columns}
        # The first row says what the file holds; a column asked for may come up later.
        if value and (column is None or column in columns):
            break

    def rows(column: str) -> Rows:
        for number, value in _json_values(path, encoding):
            yield number, value.get(column) if isinstance(value, dict) else value

    return _Table(list(columns), [c for c, v in columns.items() if isinstance(v, str | None)], rows)


def _json_values(path: Path, encoding: str) -> Rows:
    for number, line in _lines(path, encoding):
        text = str(line).strip()
        try:
            yield number, json.loads(text) if text else ""
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, row {number:,} isn't JSON ({getattr(error, 'msg', error)}); a .jsonl file holds "
                "one object a line"
            ) from error


# Parquet and datasets


def _parquet_table(path: Path) -> _Table:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as parquet: {error}") from error

    def rows(column: str) -> Rows:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                batches = file.iter_batches(_BATCH, columns=[column])
                yield from enumerate(
                    (v for batch in batches for v in batch.column(0).to_pylist()), 1
                )
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is broken: {error}") from error

    types = {field.name: str(field.type).removeprefix("dictionary<values=") for field in schema}
    text = [name for name, kind in types.items() if kind.split(",")[0] in _STRING_TYPES]
    return _Table(schema.names, text, rows)


def _is_dataset(value: object) -> bool:
    # Whoever holds a dataset has imported the library; nobody else waits for it.
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset | datasets.IterableDataset)


def _dataset_table(dataset: Any) -> _Table:
    plain = dataset.with_format(None)
    if dataset.features is not None:
        columns = list(dataset.features)
        text = [c for c in columns if getattr(dataset.features[c], "dtype", "") in _STRING_TYPES]
    else:
        first: dict[str, object] = next(iter(plain), {})
        columns = list(first)  # without types, the first row stands for all
        text = [c for c, v in first.items() if isinstance(v, str | None)]

    def rows(column: str) -> Rows:
        batches = plain.select_columns([column]).iter(batch_size=_BATCH)
        values = (value for batch in batches for value in batch[column])
        yield from enumerate(values, 1)

    return _Table(columns, text, rows)


def _load_from_hub(name: str, config: str | None, split: str) -> Any:
    import datasets

    try:
        # Versions that still know scripts would ask on the terminal whether to run one. No revision is
        # pinned: texts are read, nothing is run, and whoever names a dataset means what it holds today.
        return datasets.load_dataset(  # nosec B615
            name,
            config,
            split=split,
            data_files=_SENTENCES_OF.get(name),
            trust_remote_code=False,
        )
    except Exception as error:  # of this library and of those it reads through
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            raise FileNotFoundError(
                f"{name!r} is no file or folder here and can't be reached on the hub ({reason}); check the "
                "name and the network. To work offline, load it once where the hub is reached and set "
                "HF_HUB_OFFLINE=1 with that cache, or download its file and give the path"
            ) from error
        if "ataset script" in reason or "trust_remote_code" in reason:
            raise ValueError(
                f"the hub dataset {name} is defined by a script, which is never run ({reason}); download "
                "its data and give the file"
            ) from error
        raise ValueError(
            f"the hub dataset {name} (config={config!r}, split={split!r}) can't be loaded: {reason}"
        ) from error
