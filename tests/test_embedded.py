"""The corpus that every Python carries is clean, split without a leak, and the same every time.

Invariants:
- No sentence of a held-out pair is among the training sentences, however it is capitalised or punctuated;
  no two training sentences, summaries or bodies are the same.
- The same interpreter gives the same corpus, whatever the hash seed, locale or working folder; nothing of the
  library is imported for it.
- Every training sentence reads as one: words enough, a capital or a name first, a full stop, no code.
- Without sources the topics remain; without these as well the error says so.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from st_gsinfonce import embedded
from st_gsinfonce.embedded import EmbeddedCorpus, embedded_corpus

# The module alone: the package would import torch first.
DIGEST = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("embedded", sys.argv[1])
sys.modules["embedded"] = embedded = importlib.util.module_from_spec(spec)
spec.loader.exec_module(embedded)
corpus = embedded.embedded_corpus()
assert not {"antigravity", "pydoc_data", "this", "turtle"} & set(sys.modules)
print(hashlib.sha256(repr(corpus).encode()).hexdigest())
"""

SOURCE = '''
"""Keep bees in the garden.

Bees need flowers, water and a quiet place. They sleep in winter (mostly)::

    this is. Not prose but code.

>>> This is a session, not a sentence.
0

- The first item is a sentence.
- and this is none

Back to prose with ``literal`` words, a :class:`~bees.Hive` and *stress* [1]_. See e.g. Smith for
more, and mind the well-
known rules.

==========  =============
Table head  Another head
==========  =============

:param queen: The queen is described here.
"""

class Hive:
    """A hive holds many bees"""

    def swarm(self):
        """swarm(self) -> None

        The bees leave the hive together.
        """

    async def rest(self):
        "Too short."
'''


def key(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().casefold()


def library(folder: Path, modules: dict[str, str]) -> Path:
    for name, source in modules.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder


def everything(corpus: EmbeddedCorpus) -> str:
    return "\n".join(
        [*corpus.train_sentences, *(text for pair in corpus.heldout_pairs for text in pair)]
    )


@pytest.fixture(scope="module")
def corpus() -> EmbeddedCorpus:
    return embedded_corpus()


def test_there_is_enough_to_train_and_to_measure(corpus: EmbeddedCorpus) -> None:
    assert len(corpus.train_sentences) >= 9_000
    assert len(corpus.heldout_pairs) >= 250


def test_nothing_held_out_is_trained_on(corpus: EmbeddedCorpus) -> None:
    train = {key(sentence) for sentence in corpus.train_sentences}
    for summary, body in corpus.heldout_pairs:
        assert key(summary) not in train
        pieces = re.split(r"(?<=[.!?]) ", body)
        assert not train & {key(piece) for piece in [body, *pieces] if len(piece.split()) >= 4}


def test_no_body_gives_its_summary_away(corpus: EmbeddedCorpus) -> None:
    for summary, body in corpus.heldout_pairs:
        assert key(summary) not in map(key, re.split(r"(?<=[.!?]) ", body))


def test_nothing_comes_twice(corpus: EmbeddedCorpus) -> None:
    train = [key(sentence) for sentence in corpus.train_sentences]
    assert len(set(train)) == len(train)
    sides = [key(text) for pair in corpus.heldout_pairs for text in pair]
    assert len(set(sides)) == len(sides)


def test_sentences_read_as_english(corpus: EmbeddedCorpus) -> None:
    for sentence in corpus.train_sentences:
        assert 4 <= len(sentence.split()) <= 60, sentence
        assert sentence == " ".join(sentence.split()), sentence
        assert re.search(r"[.!?][\"')]{0,2}$", sentence), sentence
        assert not re.search(r">>>|``|::|[{}\\]|->|:\w+:`", sentence), sentence
    words = [word.strip(".,").lower() for s in corpus.train_sentences for word in s.split()]
    assert words.count("the") / len(words) > 0.05  # about 0.06 in written English


@pytest.mark.slow  # reads the whole library twice more
def test_the_corpus_does_not_depend_on_the_process(corpus: EmbeddedCorpus, tmp_path: Path) -> None:
    expected = hashlib.sha256(repr(corpus).encode()).hexdigest()
    module = str(Path(embedded.__file__).resolve())
    for seed, locale, utf8 in (("1", "C", "0"), ("2", "C.UTF-8", "1")):
        places = {"PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONUTF8": utf8}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, module],
            env={**os.environ, **places},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == expected, done.stderr


def test_prose_is_kept_and_all_else_dropped(tmp_path: Path) -> None:
    corpus = embedded_corpus(library(tmp_path, {"abc.py": SOURCE}))
    assert corpus.train_sentences == (
        "Keep bees in the garden.",
        "Bees need flowers, water and a quiet place.",
        "The first item is a sentence.",
        "Back to prose with literal words, a bees.Hive and stress.",
        "See e.g. Smith for more, and mind the well-known rules.",
        "A hive holds many bees.",
        "The bees leave the hive together.",
    )
    assert corpus.heldout_pairs == ()


def test_the_split_is_by_module(tmp_path: Path) -> None:
    def module(name: str) -> str:
        return f'"""Do the work of {name} here.\n\nThe body says more about {name}."""'

    names = sorted(n for n in sys.stdlib_module_names if n not in {"idlelib", "tkinter", "lib2to3"})
    folder = library(tmp_path, {f"{name}.py": module(name) for name in names})
    corpus = embedded_corpus(folder)
    heldout = [summary.split()[-2] for summary, _ in corpus.heldout_pairs]
    assert corpus.heldout_pairs[0][1] == f"The body says more about {heldout[0]}."
    trained = {sentence.split()[-2] for sentence in corpus.train_sentences[::2]}
    assert not trained & set(heldout)
    assert 0.1 < len(heldout) / len(names) < 0.3


def test_only_the_library_is_read(tmp_path: Path) -> None:
    text = '"""This sentence belongs to {0}.\n\nThe body of {0} is here."""'
    skipped = [
        "sitecustomize.py",
        "site-packages/json/x.py",
        "dist-packages/json/x.py",
        "test/x.py",
        "unittest/test/x.py",
        "idlelib/x.py",
        "tkinter/x.py",
        "turtledemo/x.py",
        "lib2to3/x.py",
        "ensurepip/x.py",
    ]
    taken = ["json/x.py", "unittest/case.py", "random.py"]
    modules = {
        name: text.format(name.replace("/", " ").removesuffix(".py")) for name in [*skipped, *taken]
    }
    modules["ast.py"] = "def broken(:"
    corpus = embedded_corpus(library(tmp_path, modules))
    assert sorted(re.findall(r"belongs to (.*)\.", everything(corpus))) == [
        "json x",
        "random",
        "unittest case",
    ]


def test_sources_in_other_encodings_are_read(tmp_path: Path) -> None:
    source = '# -*- coding: latin-1 -*-\n"""The bear in German is Bär in short."""'
    (tmp_path / "abc.py").write_bytes(source.encode("latin-1"))
    assert embedded_corpus(tmp_path).train_sentences == ("The bear in German is Bär in short.",)


def test_the_order_of_the_file_system_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["json/a.py", "json/b.py", "abc.py", "random.py", "zipfile/c.py"]
    modules = {n: f'"""The name of this module is {n[:-3].replace("/", " ")}."""' for n in names}
    forwards = embedded_corpus(library(tmp_path, modules))
    walk = os.walk

    def backwards(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for parent, folders, files in walk(top):
            folders.sort(reverse=True)
            yield parent, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert embedded_corpus(tmp_path) == forwards
    assert len(forwards.train_sentences) > 1


def test_sources_are_not_run(tmp_path: Path) -> None:
    source = '"""This module must not be imported."""\nraise SystemExit("it was run")'
    assert len(embedded_corpus(library(tmp_path, {"abc.py": source})).train_sentences) == 1


def test_the_topics_are_enough(tmp_path: Path) -> None:
    source = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py").read_text(
        encoding="utf-8"
    )
    corpus = embedded_corpus(library(tmp_path, {"pydoc_data/topics.py": source}))
    assert len(corpus.train_sentences) > 1_000
    assert len(corpus.heldout_pairs) > 5


def test_topics_are_parsed_whatever_their_quotes(tmp_path: Path) -> None:
    text = "The title here\n**************\n\nSome topics say a little."
    for literal in (repr(text), f"r'''{text}'''"):
        source = f"topics = {{'one': {literal}, 2: 'no topic has a number'}}"
        corpus = embedded_corpus(library(tmp_path, {"pydoc_data/topics.py": source}))
        assert "Some topics say a little." in everything(corpus)
        assert "number" not in everything(corpus)


def test_without_sources_the_topics_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    assert len(embedded_corpus().train_sentences) > 1_000


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path.name} holds no Python sources"):
        embedded_corpus(tmp_path)
