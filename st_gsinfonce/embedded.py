"""The embedded corpus: English that every Python carries, so that nothing has to be downloaded.

The docstrings of the standard library and the topics of ``pydoc`` hold some fifteen thousand distinct
sentences, and a few thousand docstrings whose summary line is followed by a body that explains it. The
sentences train an encoder; the (summary, body) pairs of modules kept apart measure it by retrieval.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

# Tests and demos say little, bundled packages belong to others.
_SKIPPED_FOLDERS = frozenset(
    "test tests idle_test idlelib tkinter turtledemo lib2to3 ensurepip pydoc_data".split()
)
_HELD_OUT_BUCKETS = 5  # one module in five is held out
_MIN_WORDS, _MAX_WORDS = 4, 60
_MIN_LETTERS = 0.8  # share of letters and spaces below which a text is code or a table

_UNDERLINE = re.compile(r"([=\-~^*+#\"'])\1{2,}")
_BULLET = re.compile(r"(?:[-*+•]|\d{1,2}[.)]|\([0-9a-z]{1,2}\)|[a-z]\))\s+")
_MARKED = re.compile(r">>>|\.\.\.(?:\s|$)|\.\. |:[a-z]+[^:]*:|@|#|\$|%|--?\w|[|+]")
_COLUMNS = re.compile(r"\S {3,}\S|\t|\s--\s.*\s--\s")
_CODE = re.compile(
    r"^(?:Args|Arguments|Parameters|Attributes|Returns|Raises|Yields|Options)\s*:|"
    r"::|>>>|->|=>|<-|--\w|[=!<>]=|\w=\S|\s[=<>|+/^%]\s|[{}\\|<>~^$@]|\w\(\w*[,=]|\(\)\.\w|\.\.\.\w|_{3,}"
    r"|https?:|www\.|\w\[[\w:]|[\[(]\s|\s[\])]|\*\w|\d\.\d+\.\d|%\w|;\s*$|[/#]\w+/|\"\"|''|\s[,;]"
)
_MARKUP = (
    (re.compile(r"(?<!\w):[a-z]+(?::[a-z]+)?:`[~!]?([^`<]+?)(?:\s*<[^>]*>)?`"), r"\1"),  # roles
    (re.compile(r"`([^`<>]+?)\s*<[^>`]+>`_{1,2}"), r"\1"),  # links
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`']+)[`']_?"), r"\1"),
    (re.compile(r"(?<![\w*])\*{1,2}([A-Za-z][^*\n]*?)\*{1,2}(?![\w*])"), r"\1"),  # emphasis
    (re.compile(r"\s?\[[\w.#]{1,3}\]_?"), ""),  # footnote marks
)
_BREAK = re.compile(r"(?<=[.!?])[\"')]{0,2}\s+(?=[\"'(]?[A-Z])")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:e\.?g|i\.?e|etc|cf|vs|resp|approx|incl|No|Nos|Mr|Dr|St|Fig|Eq|Sec|Sect|[A-Z])\."
    r"[\"')]*$"
)
_SENTENCE = re.compile(
    r"(?:[\"'(]?[A-Z]|[\"']?\w+[\"']? (?:is|are|was|may|must|can|should|will|has|defaults) )"
    r".*[\w)\]\"'][.!?][\"')]{0,2}"
)


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Sentences to train on and pairs to measure by, with no sentence in both.

    Attributes:
        train_sentences: Distinct sentences, in the order of the sorted modules.
        heldout_pairs: Distinct ``(summary, body)`` pairs from modules that give no training sentence.
            No two pairs share a summary or a body.
    """

    train_sentences: tuple[str, ...]
    heldout_pairs: tuple[tuple[str, str], ...]


def embedded_corpus(library: str | os.PathLike[str] | None = None) -> EmbeddedCorpus:
    """Read the sentences of the standard library's docstrings and of the ``pydoc`` topics.

    The sources are parsed, never imported, in sorted order, and the split is by a digest of the module's
    name: the same interpreter always gives the same corpus, whatever the hash seed, locale or folder.
    Different versions of Python give somewhat different ones. Where the interpreter comes without its sources
    (a zip or compiled files only), the topics alone remain, as long as they can be imported.

    Args:
        library: The folder of the library's sources, by default that of the running interpreter.

    Returns:
        The corpus; about one module in five is held out.

    Raises:
        FileNotFoundError: There are neither library sources nor topics.
    """
    folder = Path(sysconfig.get_path("stdlib") if library is None else library)
    documents = list(_docstrings(folder))
    topics = _topics(folder / "pydoc_data" / "topics.py", may_import=library is None)
    documents += [(f"topic {name}", text) for name, text in sorted(topics.items())]
    if not documents:
        raise FileNotFoundError(
            f"{folder} holds no Python sources and pydoc_data.topics is missing, so there is no embedded "
            "corpus; install the sources of the standard library or train on a file of sentences"
        )
    train: dict[str, str] = {}
    heldout: set[str] = set()
    pairs: list[tuple[str, str]] = []
    for module, text in documents:
        paragraphs = _paragraphs(text)
        found = [sentence for paragraph in paragraphs for sentence in _sentences(paragraph)]
        if _is_heldout(module):
            heldout.update(map(_key, found))
            pairs.extend(_pair(paragraphs))
        else:
            for sentence in found:
                train.setdefault(_key(sentence), sentence)
    return EmbeddedCorpus(
        train_sentences=tuple(text for key, text in train.items() if key not in heldout),
        heldout_pairs=tuple(_distinct(pairs)),
    )


def _is_heldout(module: str) -> bool:
    # hash() differs from one process to the next, a digest doesn't.
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_BUCKETS == 0


def _docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, docstring) for every docstring below the folder."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(n for n in folders if n.isidentifier() and n not in _SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(parent, file)
            parts = path.relative_to(folder).with_suffix("").parts
            # What a site or a distributor adds (sitecustomize.py) isn't the library's.
            if path.suffix != ".py" or parts[0] not in sys.stdlib_module_names:
                continue
            tree = _parse(path)
            if tree is None:
                continue
            for node in ast.walk(tree):
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    text = ast.get_docstring(node)
                    if text:
                        yield ".".join(parts), text


def _parse(path: Path) -> ast.Module | None:
    """Return the syntax tree, or None for a file that can't be read or isn't Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            return ast.parse(path.read_bytes())  # bytes, so that the coding cookie counts
    except (OSError, SyntaxError, ValueError):
        return None


def _topics(path: Path, *, may_import: bool) -> dict[str, str]:
    """Return the texts of ``pydoc``'s topics by name, from the source if there is one."""
    tree = _parse(path)
    if tree is not None:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                return _strings(ast.literal_eval(node.value))
    if may_import:
        try:
            return _strings(importlib.import_module("pydoc_data.topics").topics)
        except (ImportError, AttributeError):
            pass
    return {}


def _strings(topics: dict[object, object]) -> dict[str, str]:
    return {k: v for k, v in topics.items() if isinstance(k, str) and isinstance(v, str)}


def _paragraphs(text: str) -> list[str]:
    """Return the prose paragraphs, markup removed, each on one line; code, lists and tables are left out."""
    kept: list[str] = []
    code_indent: int | None = None  # set after "::", as long as what follows is indented deeper
    for block in re.split(r"\n\s*\n", text.expandtabs()):
        lines = [line.rstrip() for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        if code_indent is not None and indent > code_indent:
            continue
        code_indent = indent if lines[-1].endswith("::") else None
        for text in _prose(lines):
            # Summary lines often go without their full stop.
            kept.append(text if kept or not text[-1].isalnum() else f"{text}.")
    return kept


def _prose(lines: list[str]) -> Iterator[str]:
    """Yield the texts of one block: list items come apart, what looks like code or a table is dropped."""
    text: list[str] = []
    for line in (line.strip() for line in lines):
        bullet = _BULLET.match(line)
        if _UNDERLINE.fullmatch(line):
            text = []  # it was a heading
        elif _MARKED.match(line) and not bullet or _COLUMNS.search(line):
            return
        elif bullet:
            yield from _joined(text)
            text = [line[bullet.end() :]]
        else:
            text.append(line)
    yield from _joined(text)


def _joined(lines: Iterable[str]) -> Iterator[str]:
    # A line that ends in a hyphen goes on with the other half of the word.
    text = " ".join(re.sub(r"(?<=[A-Za-z])-\n(?=[a-z])", "-", "\n".join(lines)).split())
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    if text:
        yield text


def _sentences(paragraph: str) -> Iterator[str]:
    """Yield the sentences of a paragraph that read as English."""
    start = 0
    for match in _BREAK.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph[start : match.end()].rstrip()):
            yield from _clean(paragraph[start : match.end()].rstrip())
            start = match.end()
    yield from _clean(paragraph[start:])


def _clean(text: str) -> Iterator[str]:
    words = text.split()
    letters = sum(character.isalpha() or character == " " for character in text)
    if (
        _MIN_WORDS <= len(words) <= _MAX_WORDS
        and letters >= _MIN_LETTERS * len(text)
        and _SENTENCE.fullmatch(text)
        and not _CODE.search(text)
        and text.count("(") == text.count(")")
        and text.count('"') % 2 == 0
        and text.count("[") == text.count("]")
    ):
        yield unicodedata.normalize("NFC", text)


def _pair(paragraphs: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the first sentence with what follows it, where a docstring has these two."""
    if not paragraphs:
        return
    summary, *body = [*_sentences(paragraphs[0])] or [""]
    for paragraph in paragraphs[1:]:
        body.extend(_sentences(paragraph))
    body = [
        sentence for sentence in body if _key(sentence) != _key(summary)
    ]  # no query in its answer
    if summary and body:
        ends = accumulate(len(sentence.split()) for sentence in body)
        length = max(1, sum(end <= _MAX_WORDS for end in ends))
        yield summary, " ".join(body[:length])


def _key(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _distinct(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs whose summary and body are both new: every query has one right answer."""
    seen: set[str] = set()
    for summary, body in pairs:
        keys = {_key(summary), _key(body)}
        if len(keys) == 2 and not keys & seen:
            seen |= keys
            yield summary, body
