"""Sentences come in whole, clean and counted, or an error says what is wrong and where.

Invariants:
- kept + dropped = read, for every input; cleaning what was kept keeps all of it.
- The same rows give the same sentences in the same order through every source: txt, csv, tsv, jsonl, parquet,
  gzip, a folder, a Dataset, an iterable. Only a line feed ends a line of text.
- Bad input raises ValueError, TypeError or FileNotFoundError that names the file or argument, the row where
  there is one, and what to do. Nothing is dropped unreported and no code is run.
- The report reads "kept 9,871 of 10,000: 103 duplicates, 20 blank, 6 not text (first: row 17)".
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from st_gsinfonce.corpus import Corpus, CorpusReport, Dropped, load_sentences

TEXTS = [
    "The cat sleeps.",
    'She said "no", twice.',
    "Ein schöner Tag.",
    "猫が寝ている。",
    "Last one.",
]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_csv(path: Path, header: list[str], rows: list[list[Any]], **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, **options).writerows([header, *rows])
    return path


# What is kept, what is dropped, and how it is told


def test_report_reads_as_promised() -> None:
    rows: list[object] = [f"sentence number {i}" for i in range(10_000)]
    for place in (16, 100, 101, 102, 103, 104):
        rows[place] = None if place % 2 else float("nan")
    for place in range(200, 220):
        rows[place] = " \t"
    for place in range(300, 403):
        rows[place] = "sentence number 9"
    corpus = load_sentences(rows)
    expected = "kept 9,871 of 10,000: 103 duplicates, 20 blank, 6 not text (first: row 17)"
    assert str(corpus.report) == expected
    assert [(d.reason, d.count, d.first) for d in corpus.report.dropped] == [
        ("duplicates", 103, "row 301"),
        ("blank", 20, "row 201"),
        ("not text", 6, "row 17"),
    ]
    assert [d.example for d in corpus.report.dropped] == ["'sentence number 9'", "' \\t'", "nan"]
    assert corpus.report.kept == len(corpus.sentences) == 9_871


def test_report_without_losses_has_no_reasons() -> None:
    assert str(load_sentences(["one", "two"]).report) == "kept 2 of 2"


def test_report_counts_with_commas() -> None:
    report = CorpusReport(2_000_000, (Dropped("blank", 1_500, "row 1,001", "''"),))
    assert str(report) == "kept 1,998,500 of 2,000,000: 1,500 blank (first: row 1,001)"


@pytest.mark.parametrize(
    "value", [None, float("nan"), 3, 2.5, True, b"bytes", ["list"], {"a": "dict"}]
)
def test_what_is_not_text_is_dropped(value: object) -> None:
    report = load_sentences(["one", value, "two"]).report
    assert [(d.reason, d.count, d.first) for d in report.dropped] == [("not text", 1, "row 2")]


@pytest.mark.parametrize(
    "blank",
    [
        "",
        " ",
        "\t\r\n",
        "\u00a0\u3000",
        "\u200b\u200d\ufeff",
        "\u2028",
        "\u202e\u202c",
        "\x00",
        "\u00ad",
    ],
)
def test_what_nobody_sees_is_blank(blank: str) -> None:
    report = load_sentences(["one", blank, "two"]).report
    assert [(d.reason, d.count, d.first) for d in report.dropped] == [("blank", 1, "row 2")]


def test_single_visible_characters_are_kept() -> None:
    visible = ["a", "7", "!", "猫", "😀", "ש", "\u0301", "€"]
    assert load_sentences(visible).sentences == visible


def test_lone_surrogates_are_dropped_and_named() -> None:
    corpus = load_sentences(["fine", "half \ud83d a face", "\udc80", "whole 😀"])
    assert corpus.sentences == ["fine", "whole 😀"]
    (dropped,) = corpus.report.dropped
    assert (dropped.reason, dropped.count, dropped.first) == ("broken Unicode", 2, "row 2")
    dropped.example.encode()  # fit to print


def test_duplicates_are_compared_after_stripping_and_in_normal_form() -> None:
    composed, decomposed = "caf\u00e9 noir", "cafe\u0301 noir"
    assert composed != decomposed
    corpus = load_sentences([decomposed, composed, f"  {composed}\n", "Caf\u00e9 noir"])
    # The first is kept as it was written; upper and lower case differ.
    assert corpus.sentences == [decomposed, "Caf\u00e9 noir"]


def test_text_is_kept_as_written() -> None:
    torture = [
        "a\x00b",
        "right \u202eto left\u202c",
        "zero\u200bwidth",
        "two  spaces",
        "line\u2028separator",
        "form\x0cfeed",
        "next\x85line",
        "x" * 1_000_000,
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    ]
    assert load_sentences([f" {text} " for text in torture]).sentences == torture


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(),
            st.text(
                alphabet=st.characters(categories=["Zs", "Cf", "Cc", "Cs", "Mn", "L"]), max_size=3
            ),
            st.none(),
            st.floats(),
            st.binary(),
            st.integers(),
        )
    )
)
def test_any_rows_add_up_and_cleaning_is_idempotent(rows: list[object]) -> None:
    try:
        corpus = load_sentences(rows, min_sentences=1)
    except ValueError as error:
        assert f"kept 0 of {len(rows)}" in str(error)
        return
    report = corpus.report
    assert report.total == len(rows)
    assert report.kept == len(corpus.sentences)
    assert report.kept + sum(d.count for d in report.dropped) == len(rows)
    keys = [unicodedata.normalize("NFC", s) for s in corpus.sentences]
    assert len(set(keys)) == len(keys)
    "".join(corpus.sentences).encode()
    again = load_sentences(corpus.sentences, min_sentences=1)
    assert again == Corpus(corpus.sentences, CorpusReport(len(corpus.sentences)))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.binary(max_size=300),
    suffix=st.sampled_from([".txt", ".csv", ".tsv", ".jsonl", ".parquet"]),
)
def test_any_bytes_are_read_or_refused_by_name(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = write(tmp_path / f"any{suffix}", content)
    try:
        load_sentences(path)
    except ValueError as error:
        assert str(path) in str(error)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")), min_size=1
    )
)
def test_files_and_lists_agree(tmp_path: Path, rows: list[str]) -> None:
    """Canary of the readers: what is written row by row is what comes back."""
    rows = ["First.", *rows, "Last, but one."]
    expected = load_sentences(rows)
    head = [["text"], *([row] for row in rows)]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(head)
    write(tmp_path / "a.txt", "\n".join(rows))
    write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": row}) for row in rows))
    for name in ("a.csv", "a.txt", "a.jsonl"):
        found = load_sentences(tmp_path / name)
        assert found.sentences == expected.sentences, name
        assert found.report.total == len(rows), name


# Every door in


def as_txt(folder: Path) -> Path:
    return write(folder / "a.txt", "\n".join(TEXTS) + "\n")


def as_txt_gz(folder: Path) -> Path:
    return write(folder / "a.txt.gz", gzip.compress("\n".join(TEXTS).encode()))


def as_csv(folder: Path) -> Path:
    return write_csv(folder / "a.csv", ["id", "text"], [[i, text] for i, text in enumerate(TEXTS)])


def as_tsv(folder: Path) -> Path:
    lines = ["score\tsentence", *(f"{i}\t{text}" for i, text in enumerate(TEXTS))]
    return write(folder / "a.tsv", "\n".join(lines))


def as_jsonl(folder: Path) -> Path:
    return write(
        folder / "a.jsonl", "\n".join(json.dumps({"n": 1, "body": text}) for text in TEXTS)
    )


def as_json_strings(folder: Path) -> Path:
    return write(folder / "b.jsonl", "\n".join(json.dumps(text) for text in TEXTS))


def as_parquet(folder: Path) -> Path:
    dataset().to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def as_folder(folder: Path) -> Path:
    write(folder / "part-2.txt", "\n".join(TEXTS[3:]))
    write(folder / "part-1.jsonl", "\n".join(json.dumps({"text": t}) for t in TEXTS[:3]))
    write(folder / "README.md", "not a sentence of the corpus")
    write(folder / ".hidden.txt", "not a sentence of the corpus")
    (folder / "sub").mkdir()
    write(folder / "sub" / "deeper.txt", "not a sentence of the corpus")
    return folder


def dataset(_: Path | None = None) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"n": list(range(len(TEXTS))), "text": TEXTS})


def iterable_dataset(_: Path) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(
        lambda: ({"text": text, "n": 1} for text in TEXTS)
    )


DOORS: list[Callable[[Path], Any]] = [
    as_txt,
    as_txt_gz,
    as_csv,
    as_tsv,
    as_jsonl,
    as_json_strings,
    as_parquet,
    as_folder,
    lambda folder: str(as_txt(folder)),
    dataset,
    lambda _: dataset().with_format("numpy"),
    lambda _: dataset().to_iterable_dataset(),
    iterable_dataset,
    lambda _: datasets.DatasetDict({"test": dataset().select([0]), "train": dataset()}),
    lambda _: dataset()["text"],
    lambda _: TEXTS,
    lambda _: tuple(TEXTS),
    lambda _: iter(TEXTS),
]


@pytest.mark.filterwarnings("ignore:.*left out are README.md:UserWarning")
@pytest.mark.parametrize("door", DOORS)
def test_every_door_leads_to_the_same_sentences(
    door: Callable[[Path], Any], tmp_path: Path
) -> None:
    corpus = load_sentences(door(tmp_path))
    assert corpus.sentences == TEXTS
    assert str(corpus.report) == "kept 5 of 5"


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    odd = "one\u2028same\x0bsame\x85same\rsame\x1csame"
    path = write(tmp_path / "a.txt", f"\ufeff{odd}\r\nsecond\r\n\r\nlast")
    corpus = load_sentences(path)
    assert corpus.sentences == [odd, "second", "last"]
    assert str(corpus.report) == "kept 3 of 4: 1 blank (first: row 3)"


@pytest.mark.parametrize(
    ("name", "head"), [("a.csv", "text\r\n"), ("a.tsv", "text\n"), ("a.jsonl", "")]
)
def test_byte_order_mark_is_no_part_of_the_text(name: str, head: str, tmp_path: Path) -> None:
    body = '"one"\n"two"\n' if name != "a.tsv" else "one\ntwo\n"
    assert load_sentences(write(tmp_path / name, f"\ufeff{head}{body}")).sentences == ["one", "two"]


def test_a_long_line_and_nul_bytes_pass(tmp_path: Path) -> None:
    long = "long " * 200_000 + "end"
    for name, head in (("a.txt", ""), ("a.csv", "text\n"), ("a.tsv", "text\n")):
        path = write(tmp_path / name, f"{head}{long}\nshort\x00er\n")
        assert load_sentences(path).sentences == [long, "short\x00er"], name
    assert csv.field_size_limit() == 131_072  # the setting of the whole process is as it was


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le"])
def test_other_encodings_when_asked_for(encoding: str, tmp_path: Path) -> None:
    texts = ["Der Bär schläft.", "Élan vital"]
    path = write(tmp_path / "a.txt", "\n".join(texts).encode(encoding))
    assert load_sentences(path, encoding=encoding).sentences == texts


def test_a_quote_in_a_tsv_is_a_plain_character(tmp_path: Path) -> None:
    texts = ['"Yes" was the answer.', '"An open quote', 'And the end"']
    path = write(tmp_path / "a.tsv", "\n".join(["text", *texts]))
    assert load_sentences(path).sentences == texts


def test_rows_are_numbered_as_in_an_editor(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,n\n"first\nline",1\n,2\nlast,3\nshort\n')
    corpus = load_sentences(path, column="text")
    assert corpus.sentences == ["first\nline", "last", "short"]
    assert [(d.reason, d.first) for d in corpus.report.dropped] == [("blank", "row 4")]
    missing = load_sentences(
        write(tmp_path / "b.csv", "n,text\n1,one\n2\n\n3,two\n")
    ).report.dropped
    assert [(d.reason, d.first) for d in missing] == [("blank", "row 4"), ("not text", "row 3")]


def test_a_folder_names_the_file_of_a_row(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\ntwo\n")
    write(tmp_path / "b.txt", "three\n\none\n")
    report = load_sentences(tmp_path).report
    assert [(d.reason, d.first) for d in report.dropped] == [
        ("duplicates", "b.txt row 3"),
        ("blank", "b.txt row 2"),
    ]


def test_max_sentences_stops_reading() -> None:
    def endless() -> Iterator[str]:
        number = 0
        while True:
            number += 1
            yield f"sentence {number // 2}"

    corpus = load_sentences(endless(), max_sentences=3)
    assert corpus.sentences == ["sentence 0", "sentence 1", "sentence 2"]
    assert str(corpus.report) == "kept 3 of 4: 1 duplicate (first: row 3)"


def test_real_sentences_pass_untouched(corpus_file: Path) -> None:
    lines = corpus_file.read_bytes().decode().split("\n")
    corpus = load_sentences(corpus_file)
    assert corpus.report.kept >= 0.9 * len(lines)
    assert set(corpus.sentences) <= {line.strip() for line in lines}


def test_the_report_is_logged_and_nothing_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="st_gsinfonce"):
        load_sentences(["one", "", "two"])
    assert "the list given: kept 2 of 3: 1 blank (first: row 2)" in caplog.messages
    assert capsys.readouterr() == ("", "")


# Columns


def test_the_only_text_column_is_taken_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="st_gsinfonce"):
        corpus = load_sentences(datasets.Dataset.from_dict({"n": [1, 2], "quote": ["one", "two"]}))
    assert corpus.column == "quote"
    assert "the Dataset given: reading column 'quote'" in caplog.messages
    assert load_sentences(as_csv(tmp_path)).column == "text"
    assert load_sentences(as_txt(tmp_path)).column is None


@pytest.mark.parametrize("name", ["label", "labels", "score", "scores"])
def test_columns_with_the_names_of_labels_are_read_as_text(name: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["id", name], [["1", "one"], ["2", "two"]])
    assert load_sentences(path, column=name).sentences == ["one", "two"]


@pytest.mark.parametrize("columns", [["premise", "hypothesis"], ["text", "sentence"]])
def test_several_text_columns_must_be_chosen_from(columns: list[str], tmp_path: Path) -> None:
    rows = [["one", "two"], ["three", "four"]]
    path = write_csv(tmp_path / "a.csv", columns, rows)
    with pytest.raises(
        ValueError, match=f"a.csv has several text columns .*{columns[0]}, {columns[1]}.*column="
    ):
        load_sentences(path)
    table = datasets.Dataset.from_dict(dict(zip(columns, rows, strict=True)))
    with pytest.raises(
        ValueError, match=f"the Dataset given has several .*{columns[0]}, {columns[1]}"
    ):
        load_sentences(table)
    assert load_sentences(path, column=columns[1]).sentences == ["two", "four"]


@pytest.mark.parametrize("door", [as_csv, as_tsv, as_jsonl, as_parquet, dataset, iterable_dataset])
def test_a_missing_column_lists_those_there_are(
    door: Callable[[Path], Any], tmp_path: Path
) -> None:
    source = door(tmp_path)
    name = source.name if isinstance(source, Path) else "given"
    with pytest.raises(
        ValueError, match=f"{name} has no column 'nope'; its columns are .*(text|sentence|body)"
    ):
        load_sentences(source, column="nope")


@pytest.mark.parametrize("door", [as_txt, as_json_strings, lambda _: TEXTS])
def test_plain_text_has_no_columns(door: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no columns, so column='text'"):
        load_sentences(door(tmp_path), column="text")


def test_no_text_column_at_all() -> None:
    with pytest.raises(ValueError, match=r"no text column \(its columns: n, m\)"):
        load_sentences(datasets.Dataset.from_dict({"n": [1], "m": [2.0]}))


def test_a_column_of_numbers_keeps_nothing_and_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"gives 0 distinct sentences.*kept 0 of 2: 2 not text \(first: row 1\)"
    ):
        load_sentences(datasets.Dataset.from_dict({"n": [1, 2]}), column="n")


def test_a_json_column_may_come_up_late(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", '{"n": 1}\n{"n": 2, "text": "one"}\n["x"]\n{"text": "two"}\n'
    )
    corpus = load_sentences(path, column="text")
    assert corpus.sentences == ["one", "two"]
    assert str(corpus.report) == "kept 2 of 4: 2 not text (first: row 1)"


def test_a_json_column_may_begin_with_null(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", '\n{"text": null, "n": 1}\n{"text": "one"}\n{"text": "two"}\n'
    )
    assert load_sentences(path).sentences == ["one", "two"]


# Bad input: (name of the file, its content, what the error says)

BAD_FILES = [
    ("empty.txt", b"", "empty.txt is empty"),
    ("empty.parquet", b"", "empty.parquet is empty"),
    ("empty.txt.gz", gzip.compress(b""), "empty.txt.gz is empty"),
    (
        "blank.txt",
        b"\n \n\t\n",
        r"blank.txt gives 0 distinct sentences.*kept 0 of 3: 3 blank \(first: row 1\)",
    ),
    (
        "same.txt",
        b"one\none\none\n",
        r"gives 1 distinct sentence, but at least 2 .*2 duplicates.*row 2: 'one",
    ),
    (
        "latin.txt",
        "one\ntwo\nB\xe4r\n".encode("latin-1"),
        r"latin.txt isn't utf-8 text: byte 0xe4 in line 3.*encoding=",
    ),
    ("cut.txt", b"one\ntwo\xc3", r"cut.txt isn't utf-8 text: byte 0xc3 in line 2"),
    (
        "latin.csv",
        "text\none\nB\xe4r\n".encode("latin-1"),
        "latin.csv isn't utf-8 text: byte 0xe4 in line 3",
    ),
    ("wide.txt", "one\ntwo".encode("utf-16"), 'wide.txt begins as UTF-16 .*encoding="utf-16"'),
    (
        "wider.txt",
        "one\ntwo".encode("utf-16-le"),
        "wider.txt is binary .*many NUL bytes.*encoding=",
    ),
    ("zipped.txt", b"PK\x03\x04\x14\x00" + b"data" * 50, "zipped.txt is binary .*PK"),
    ("packed.csv", gzip.compress(b"text\none\ntwo\n"), "packed.csv is binary .*begins with"),
    ("broken.txt.gz", b"no gzip at all", "broken.txt.gz is a broken gzip file"),
    ("short.txt.gz", gzip.compress(b"one\ntwo\n" * 99)[:-9], "short.txt.gz is a broken gzip file"),
    (
        "paper.pdf",
        b"%PDF-1.4",
        r"paper.pdf has an unknown file type \(\.pdf\); readable are \.txt, \.csv",
    ),
    ("noending", b"one\ntwo\n", r"noending has an unknown file type \(no ending\)"),
    ("load.py", b"raise SystemExit", "load.py is a script; scripts are never run"),
    ("bad.parquet", b"PAR1 and nothing else", "bad.parquet can't be read as parquet"),
    ("bad.jsonl", b'{"text": "one"}\n{"text": "two"\n', "bad.jsonl, row 2 isn't JSON"),
    ("deep.jsonl", b"[" * 100_000, "deep.jsonl, row 1 isn't JSON"),
    (
        "open.csv",
        b'text\none\n"never closed\ntwo\n',
        "open.csv, row 3 is malformed.*every quoted cell must end",
    ),
    (
        "comma.csv",
        b"text\nfine\nHello, world\n",
        "comma.csv, row 3 has 2 cells, its header 1; quote",
    ),
    (
        "bare.csv",
        b"The cat sleeps on a mat.\nIt rains.\n",
        "bare.csv seems to lack a header row.*The cat",
    ),
    ("void.csv", b"\n\n", "void.csv has no header row"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), BAD_FILES, ids=[case[0] for case in BAD_FILES]
)
def test_bad_files_are_refused_by_name(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        load_sentences(path)


def test_a_wrong_encoding_far_down_names_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.txt", "".join(f"Zeile {i} é\n" for i in range(30_000)).encode() + b"B\xe4r\n"
    )
    with pytest.raises(UnicodeError, match="byte 0xe4 in line 30,001"):
        load_sentences(path)


def test_a_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\ntwo\n")
    write(tmp_path / "b.jsonl", '{"text": "three"}\n{\n')
    with pytest.raises(ValueError, match="b.jsonl, row 2 isn't JSON"):
        load_sentences(tmp_path)


@pytest.mark.parametrize(
    "name", ["missing.txt", "folder/missing.csv", "missing", "a sentence, not a path", "x" * 5000]
)
def test_a_missing_file_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in (name, Path(name)):
        with pytest.raises(
            FileNotFoundError, match=f"no such file or folder.*{name[:50]}.*list of sentences"
        ):
            load_sentences(source)


def test_a_missing_path_is_never_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    for source in (Path("org/name"), "org/name.txt", "one/two/three", "name"):
        with pytest.raises(FileNotFoundError):
            load_sentences(source)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no file; readable are .txt"),
        (["a.md", "b.pdf"], "holds only a.md, b.pdf; readable are"),
    ],
)
def test_a_folder_with_nothing_to_read(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / name, "text")
    with pytest.raises(ValueError, match=f"{tmp_path.name} {message}"):
        load_sentences(tmp_path)


def test_what_a_folder_holds_besides_is_said(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one sentence\nanother\n")
    write(tmp_path / "notes.json", "{}")
    with pytest.warns(UserWarning, match=r"left out are notes.json; readable are \.txt"):
        assert load_sentences(tmp_path).sentences == ["one sentence", "another"]
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="b.txt is neither a"):
        load_sentences(tmp_path)


@pytest.mark.parametrize("with_data", [False, True])
def test_a_dataset_script_is_refused_and_not_run(with_data: bool, tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    trace = tmp_path / "ran"
    write(folder / "scripted.py", f"open({str(trace)!r}, 'w')")
    if with_data:
        write(folder / "data.txt", "one\ntwo\n")
    with pytest.raises(ValueError, match=r"holds a script \(scripted.py\).*never run"):
        load_sentences(str(folder))
    assert not trace.exists()


@pytest.mark.parametrize("source", [3, None, b"a.txt", {"one", "two"}, {"text": ["one"]}, object()])
def test_sources_of_a_wrong_type_are_named(source: object) -> None:
    with pytest.raises(TypeError, match=f"source must be .* got {type(source).__name__}"):
        load_sentences(source)  # type: ignore[arg-type]


def test_a_data_frame_is_no_list_of_sentences() -> None:
    frame = dataset().to_pandas()
    with pytest.raises(TypeError, match="a data frame's column"):
        load_sentences(frame)
    assert load_sentences(frame["text"]).sentences == TEXTS


@pytest.mark.parametrize("source", ["", "  "])
def test_an_empty_name_is_not_the_working_folder(source: str) -> None:
    with pytest.raises(ValueError, match="source must be a path"):
        load_sentences(source)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_sentences": 0}, ValueError, "min_sentences must be at least 1, got 0"),
        ({"min_sentences": 2.5}, TypeError, "min_sentences must be a whole number, got 2.5"),
        ({"min_sentences": True}, TypeError, "min_sentences must be a whole number, got True"),
        ({"max_sentences": -1}, ValueError, "max_sentences must be at least 1, got -1"),
        (
            {"min_sentences": 9, "max_sentences": 5},
            ValueError,
            r"max_sentences must be at least .*\(9\), got 5",
        ),
        ({"encoding": "utf-9"}, ValueError, "encoding must be .*utf-9"),
        ({"encoding": "hex"}, ValueError, "encoding must be .*hex"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_sentences(TEXTS, **arguments)


def test_fewer_sentences_than_a_batch_names_both_numbers() -> None:
    with pytest.raises(
        ValueError, match="the list given gives 5 distinct sentences, but at least 64 are needed"
    ):
        load_sentences(TEXTS, min_sentences=64)
    assert len(load_sentences(TEXTS, min_sentences=5).sentences) == 5


def test_a_missing_split_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="no split 'train'; its splits are test, dev"):
        load_sentences(datasets.DatasetDict({"test": dataset(), "dev": dataset()}))


# The hub


def test_a_hub_dataset_out_of_reach_says_how_to_work_offline() -> None:
    with pytest.raises(
        FileNotFoundError, match="'nobody/no-such-set' .*hub.*HF_HUB_OFFLINE=1.*give the path"
    ):
        load_sentences("nobody/no-such-set")


def test_a_hub_dataset_is_read_and_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(
        name: str,
        config: str | None,
        *,
        split: str,
        data_files: str | None,
        trust_remote_code: bool,
    ) -> Any:
        assert data_files is None  # all of them
        calls.append((name, config, split, trust_remote_code))
        return dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_sentences("org/name", split="dev", config="small").sentences == TEXTS
    assert calls == [("org/name", "small", "dev", False)]


def test_simcse_s_dataset_is_its_sentences_not_its_nli_pairs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself reads a folder of the same files: it alone would choose the pairs."""
    folder = tmp_path_factory.mktemp("simcse")  # "test" in its name would be a split's
    for name, text in (
        ("nli_for_simcse.csv", "sent0,sent1,hard_neg\na b,c d,e f\n"),
        ("wiki1m_for_simcse.txt", "".join(f"{text}\n" for text in TEXTS)),
        ("senteval.tar", "no text"),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    load = datasets.load_dataset

    def load_dataset(name: str, *args: Any, trust_remote_code: bool, **kwargs: Any) -> Any:
        assert name == "princeton-nlp/datasets-for-simcse"
        return load(str(folder), *args, cache_dir=str(folder.parent / "cache"), **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_sentences("princeton-nlp/datasets-for-simcse").sentences == TEXTS
    monkeypatch.setattr("st_gsinfonce.sources._SENTENCES_OF", {})
    with pytest.raises(ValueError, match="several text columns .*sent0"):
        load_sentences("princeton-nlp/datasets-for-simcse")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            RuntimeError("Dataset scripts are no longer supported, but found x.py"),
            "org/name is defined by a script",
        ),
        (
            ValueError("Please pass trust_remote_code=True"),
            "org/name is defined by a script, which is never run",
        ),
        (
            ValueError("Unknown split 'dev'. Should be one of ['train']."),
            r"split='dev'\) can't be loaded.*Unknown",
        ),
    ],
)
def test_what_the_hub_refuses_is_told(
    raised: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=message):
        load_sentences("org/name", split="dev")


def test_a_guessed_column_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("A river runs.\nBread is baked.\nIt rains.\n")
    assert load_sentences(tmp_path / "a.csv").column == "A river runs."
    assert "reading column 'A river runs.'" in caplog.text  # at WARNING, which is shown by default


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na b,c d\n")
    with pytest.raises(ValueError, match="a.csv names a column twice"):
        load_sentences(tmp_path / "a.csv")
