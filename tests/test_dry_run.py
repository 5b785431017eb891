"""Preparing a push, in this process, which is offline.

- A dry run asks nobody and leaves the folder; otherwise nothing is left behind, however it ends.
- A model that is given keeps its head, its weights and its modes.
- What does not encode to the same vectors is not pushed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from st_gsinfonce import build_encoder, has_head, hub, push_encoder

TEXTS = ["the cat sees the dog", "a house", "the old river"]


@pytest.fixture
def checkpoint(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    build_encoder(tiny_bert, seed=0, device="cpu").save_pretrained(str(folder))
    (folder / "training_args.bin").write_bytes(b"pickle")
    return folder


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check in another process, which takes seconds and has tests of its own."""
    monkeypatch.setattr(hub, "encode_alone", lambda folder, scratch: hub.encode_samples(folder))


def test_a_dry_run_asks_nobody(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This process is offline, so that any request would fail."""
    planned = push_encoder(checkpoint, "galaxy/dry", dry_run=True)
    assert planned.folder is not None and planned.commit_url is None
    try:
        assert str(planned) == str(capsys.readouterr().out).rstrip("\n").split("\r")[-1]
        assert set(planned.files) == set(files(planned.folder))
        assert (planned.folder / "README.md").read_text(encoding="utf-8") == planned.card
        assert not has_head(planned.folder) and planned.private
        assert "training_args.bin" in planned.left_out
    finally:
        shutil.rmtree(planned.folder.parent)


def test_offline_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"):
        push_encoder(checkpoint, "galaxy/dry", token="hf_any")


def test_a_model_in_training_stays_as_it_is(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = build_encoder(tiny_bert, seed=0, device="cpu").train()
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    planned = push_encoder(model, "galaxy/dry", dry_run=True, show=lambda text: None)
    assert planned.folder is not None and planned.folder.is_relative_to(tmp_path)
    assert has_head(model) and all(module.training for module in model.modules())
    assert all((value == weights_before[name]).all() for name, value in model.state_dict().items())
    pushed = SentenceTransformer(str(planned.folder), device="cpu")
    assert np.array_equal(pushed.encode(TEXTS), model.encode(TEXTS))


def test_nothing_is_left_behind_when_it_stops(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push_encoder(checkpoint, "galaxy/dry", dry_run=True, show=stop)
    with pytest.raises(ValueError, match=r"README.md holds your access token"):
        push_encoder(
            checkpoint,
            "galaxy/dry",
            dry_run=True,
            token="a-secret-of-mine",
            run={"settings": {"precision": "a-secret-of-mine"}},
        )
    assert not list(tmp_path.iterdir())


def test_other_vectors_stop_the_push(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hub, "encode_alone", lambda folder, scratch: 1.01 * hub.encode_samples(folder)
    )
    with pytest.raises(ValueError, match="encodes to other vectors"):
        push_encoder(checkpoint, "galaxy/dry", dry_run=True)
