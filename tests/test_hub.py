"""Pushing, by the real client over HTTP to a stand-in for the hub on 127.0.0.1.

- A checkpoint goes up without its head, in one commit, private if asked; a fresh process without this
  package loads it by its name and encodes to the same vectors.
- Nothing is overwritten or made public unasked; an update keeps the user's words and no old weights.
- Whatever breaks, the message says what to do, what was given is as it was, and a second try completes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import HubServer, Repository
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformerTrainingArguments

from st_gsinfonce import build_encoder, build_trainer, has_head, load_encoder

pytestmark = pytest.mark.slow  # a push checks what it publishes in a process of its own

TOKEN = "hf_goodGOODgoodGOODgoodGOODgoodGOOD12"
READ_ONLY = "hf_readREADreadREADreadREADreadREAD12"
TEXTS = ["the cat sees the dog", "a house", "the old river"]

# Pushes as asked for on stdin. The client's pauses between its tries are skipped; the check in a process
# of its own is done where asked for, since it takes seconds.
PUSHER = """
import json, resource, sys, time
time.sleep = lambda seconds: None
answers, sys.stdout = sys.stdout, sys.stderr
import torch
torch.set_num_threads(1)
from st_gsinfonce import hub
alone = hub.encode_alone
for line in sys.stdin:
    request = json.loads(line)
    checked, limit = request.pop("checked"), request.pop("limit")
    hub.encode_alone = alone if checked else lambda folder, scratch: hub.encode_samples(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or soft, hard))
    shown = []
    try:
        pushed = hub.push_encoder(**request, show=shown.append)
        answer = {"url": pushed.commit_url, "card": pushed.card, "shown": shown}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error), "shown": shown}
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    print(json.dumps(answer), file=answers, flush=True)
"""

LOAD = """
import json, sys
sys.modules["st_gsinfonce"] = None
import torch
torch.set_num_threads(1)
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
name, texts = sys.argv[1:]
vectors = SentenceTransformer(name, device="cpu").encode(json.loads(texts)).tolist()
example = ModelCard.load(name).text.split("```python")[1].split("```")[0]
exec(example)  # the card's own
print(json.dumps({"vectors": vectors, "example": example}))
"""

Push = Callable[..., dict[str, Any]]


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer({TOKEN: {"galaxy"}, READ_ONLY: set()}) as server:
        yield server


@pytest.fixture(scope="module")
def environment(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A machine with a user, a home and a token of its own, that knows no hub but the stand-in."""
    home = tmp_path_factory.mktemp("home-of-zaphod")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return {
        **inherited,
        "HOME": str(home),
        "USER": "zaphod",
        "LOGNAME": "zaphod",
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


@pytest.fixture(scope="module")
def checkpoint(
    tiny_bert: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint of the Trainer's, with its head and with what resuming needs."""
    folder = tmp_path_factory.mktemp("run-of-zaphod")
    arguments = SentenceTransformerTrainingArguments(
        str(folder),
        per_device_train_batch_size=16,
        max_steps=1,
        save_steps=1,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    build_trainer(build_encoder(tiny_bert, seed=0, device="cpu"), sentences, arguments).train()
    checkpoint = folder / "checkpoint-1"
    assert has_head(checkpoint) and (checkpoint / "training_args.bin").is_file()
    return checkpoint


@pytest.fixture(scope="module")
def push(environment: dict[str, str], checkpoint: Path) -> Iterator[Push]:
    """Return a function that pushes the checkpoint from another process and gives its answer."""
    process = subprocess.Popen(
        [sys.executable, "-c", PUSHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )

    def start(repo_id: str, *, checked: bool = False, limit: int = 0, **keywords: Any) -> Any:
        assert process.stdin and process.stdout
        request = {"model_or_folder": str(checkpoint), "repo_id": repo_id, "token": TOKEN}
        request |= {**keywords, "checked": checked, "limit": limit}
        before = tree(checkpoint)
        print(json.dumps(request), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
        assert tree(checkpoint) == before  # whatever happened
        return answer

    with process:
        yield start
        assert process.stdin
        process.stdin.close()  # the process ends by itself, so that its coverage is counted
        process.wait(60)


def load_elsewhere(environment: dict[str, str], name: str, token: str = TOKEN) -> Any:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, name, json.dumps(TEXTS)],
        env={**environment, "HF_TOKEN": token},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_checkpoint_is_published_and_used(
    hub: HubServer, push: Push, checkpoint: Path, environment: dict[str, str], sentences: list[str]
) -> None:
    """A process pushes, one checks what is pushed, one downloads it."""
    run = {
        "settings": {"corpus": str(checkpoint / "corpus.txt"), "model": str(checkpoint)},
        "trainer": {"seed": 3, "output_dir": str(checkpoint)},
        "command": f"train --token {TOKEN}",
    }
    answer = push("galaxy/whale", checked=True, run=run, license="apache-2.0")
    assert "error" not in answer, answer
    repository = hub.repositories["galaxy/whale"]
    assert repository.private
    assert answer["url"] == f"{hub.endpoint}/galaxy/whale/commit/{repository.sha}"
    assert len(repository.commits) == 2  # the hub's own, and one
    assert sorted(repository.files) == sorted(
        [
            *(".gitattributes", "1_Pooling/config.json", "README.md", "config.json"),
            *("config_sentence_transformers.json", "model.safetensors", "modules.json"),
            *("sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"),
        ]
    )
    (shown,) = answer["shown"]
    assert shown.startswith("galaxy/whale (new, private)\n")
    for name, content in repository.files.items():
        assert name == ".gitattributes" or re.search(
            rf"{len(content):,}  {re.escape(name)}\n", shown
        )
        assert not content.startswith((b"\x80", b"PK"))
        private = (TOKEN, "zaphod", str(checkpoint), tempfile.gettempdir(), socket.getfqdn())
        for text in (*private, "ProjectionHead", "optimizer"):
            assert text.encode() not in content, (name, text)
        if name == "README.md":
            assert not [sentence for sentence in sentences if sentence.encode() in content]

    answer = load_elsewhere(environment, "galaxy/whale")
    expected = load_encoder(checkpoint, device="cpu").encode(TEXTS)
    assert np.allclose(answer["vectors"], expected, rtol=0, atol=1e-6)
    assert 'SentenceTransformer("galaxy/whale")' in answer["example"]


def test_nothing_is_overwritten_unasked(hub: HubServer, push: Push) -> None:
    assert push("galaxy/first", private=False)["url"]
    assert not hub.repositories["galaxy/first"].private
    before = dict(hub.repositories["galaxy/first"].files)
    answer = push("galaxy/first", private=False)
    assert answer["error"] == "FileExistsError" and "update=True" in answer["message"]
    assert hub.repositories["galaxy/first"].files == before


def test_an_update_keeps_the_words_and_drops_old_weights(hub: HubServer, push: Push) -> None:
    assert push("galaxy/second")["url"]
    repository = hub.repositories["galaxy/second"]
    card = repository.files["README.md"].decode().replace("# second", "# Forty-two")
    old = {
        "README.md": card.replace("### Limits", "### Old limits").encode(),
        "model-00001-of-00002.safetensors": b"old",
        "2_ProjectionHead/config.json": b"{}",
        "training_args.bin": b"pickle",
        "notes.md": b"mine",
        "onnx/config.json": b"{}",
    }
    repository.files.update(old)
    answer = push("galaxy/second", update=True, commit_message="Better", license="mit")
    assert answer["url"], answer
    assert "(update, private)" in answer["shown"][0]
    card = repository.files["README.md"].decode()
    assert "# Forty-two" in card and "### Old limits" not in card and "### Limits" in card
    assert ModelCard(card).data.license == "mit"
    assert {"notes.md", "onnx/config.json"} <= set(repository.files)
    for name in (
        "model-00001-of-00002.safetensors",
        "2_ProjectionHead/config.json",
        "training_args.bin",
    ):
        assert name not in repository.files and re.search(rf"removed  {name}", answer["shown"][0])
    assert [commit["summary"] for commit in repository.commits[1:]] == ["Add the encoder", "Better"]


def test_nothing_is_made_public_unasked(hub: HubServer, push: Push) -> None:
    hub.repositories["galaxy/open"] = Repository(private=False)
    answer = push("galaxy/open")
    assert answer["error"] == "ValueError" and "is public, but private=True" in answer["message"]
    assert set(hub.repositories["galaxy/open"].files) == {".gitattributes"}


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"token": None}, "PermissionError", "no access token.*hf auth login"),
        (
            {"token": "hf_wrong"},
            "PermissionError",
            "does not accept the access token.*hf auth login",
        ),
        (
            {"token": READ_ONLY},
            "PermissionError",
            "may not write to galaxy/refused.*write permission",
        ),
        ({"endpoint": "http://127.0.0.1:9"}, "ConnectionError", "could not be reached.*push again"),
        ({"repo_id": "not valid!"}, "ValueError", "repo_id must be USER/MODEL.*'not valid!'"),
        ({"repo_id": "galaxy/a/b"}, "ValueError", "repo_id must be USER/MODEL"),
        ({"repo_id": "bare"}, "ValueError", "before the slash is missing"),
        ({"model_or_folder": "/nowhere"}, "FileNotFoundError", "/nowhere is no saved"),
        ({"run": "/nowhere.json"}, "FileNotFoundError", "/nowhere.json"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: HubServer, push: Push, keywords: dict[str, Any], error: str, message: str
) -> None:
    answer = push(**{"repo_id": "galaxy/refused", **keywords})
    assert answer["error"] == error
    assert re.search(message, answer["message"], re.DOTALL)
    assert TOKEN not in answer["message"]
    assert "galaxy/refused" not in hub.repositories


def test_after_a_refusal_the_second_try_completes(hub: HubServer, push: Push) -> None:
    for keywords in ({"token": None}, {"token": "hf_wrong"}, {"endpoint": "http://127.0.0.1:9"}):
        assert "error" in push("galaxy/patience", **keywords)
    assert push("galaxy/patience")["url"]


def test_a_full_disk(hub: HubServer, push: Push) -> None:
    """The limit of a file's size makes the copying itself fail, as a full disk does."""
    answer = push("galaxy/small", limit=20_000)
    assert answer["error"] == "OSError"
    assert re.search(r"could not be written to .*(TMPDIR).*nothing was pushed", answer["message"])
    assert "galaxy/small" not in hub.repositories
    assert push("galaxy/small")["url"]


@pytest.mark.parametrize("request_cut", ["PUT /objects/", "POST /api/models/.*/commit"])
def test_the_connection_is_cut_in_the_middle(hub: HubServer, push: Push, request_cut: str) -> None:
    name = f"galaxy/cut-{len(request_cut)}"
    hub.objects.clear()
    hub.cut(request_cut, times=100)
    answer = push(name)
    assert answer["error"] == "ConnectionError"
    assert re.search(r"connection broke \(\w+: .*\).*push again", answer["message"])
    assert set(hub.repositories[name].files) == {".gitattributes"}  # all or nothing
    hub.cuts.clear()
    assert push(name)["url"]
    assert "model.safetensors" in hub.repositories[name].files


def test_a_commit_in_between_is_not_run_over(hub: HubServer, push: Push) -> None:
    hub.races.add("galaxy/race")
    answer = push("galaxy/race")
    assert answer["error"] == "ConnectionError" and "changed by someone else" in answer["message"]
    assert push("galaxy/race")["url"]


def test_a_short_interruption_is_overcome(hub: HubServer, push: Push) -> None:
    hub.objects.clear()
    hub.cut("PUT /objects/", times=1)
    assert push("galaxy/hiccup")["url"]
    assert not hub.takes_cut("PUT /objects/x")  # it was used
