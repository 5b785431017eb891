"""What may travel.

- Of a checkpoint the encoder travels, without the head and without what only resuming needs.
- Nothing that can run code does, under whatever name; the folder given is never changed.
- No token and no path of a machine does.
- What travels loads without this package, and other vectors are noticed.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer

from st_gsinfonce import build_encoder, has_head
from st_gsinfonce.bundle import (
    compare,
    copy_files,
    encode_alone,
    encode_samples,
    is_local,
    refuse_leaks,
)


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def source(tiny_bert: Path, tmp_path: Path) -> Path:
    """A folder of an encoder with its head, as a checkpoint holds it."""
    folder = tmp_path / "checkpoint"
    build_encoder(tiny_bert, seed=0, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "upload"
    folder.mkdir()
    return folder


def test_the_encoder_travels_and_the_training_stays(source: Path, target: Path) -> None:
    for name in ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "trainer_state.json"):
        (source / name).write_bytes(b"\x80\x04state")
    for name in ("eval/scores.csv", "runs/events.bin", "onnx/model.onnx", ".cache/x.txt", "a.csv"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    (source / "LICENSE").write_text("free")
    before = fingerprint(source)
    left_out = copy_files(source, target)
    assert fingerprint(source) == before
    assert has_head(source) and not has_head(target)
    assert set(fingerprint(target)) == {
        "1_Pooling/config.json",
        "LICENSE",
        "README.md",
        "config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(left_out) == {
        *("optimizer.pt", "training_args.bin", "rng_state_0.pth", "trainer_state.json"),
        *("eval/", "runs/", "onnx/", ".cache/", "a.csv"),
    }
    assert fingerprint(target)["model.safetensors"] == before["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modeling_mine.py", b"import os"),
        ("pytorch_model.bin", b"weights"),
        ("1_Pooling/pytorch_model.bin", b"weights"),
        ("Weights.PT", b"weights"),
        ("state.pkl", b"weights"),
        ("notes.txt", pickle.dumps({"a": 1})),
        ("notes.md", b"PK\x03\x04archive"),
        ("vocab.model", b"\x7fELF..."),
        ("run", b"#!/bin/sh\n"),
    ],
)
def test_what_can_run_code_is_refused(
    source: Path, target: Path, name: str, content: bytes
) -> None:
    (source / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"can run code.*: {name}\. Only"):
        copy_files(source, target)
    assert not any(target.iterdir())


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_by_name_is_refused(source: Path, target: Path, name: str) -> None:
    settings = json.loads((source / name).read_text())
    (source / name).write_text(json.dumps({**settings, "auto_map": {"AutoModel": "x--y.Z"}}))
    with pytest.raises(ValueError, match=rf"{name} names code of its own"):
        copy_files(source, target)


def test_a_folder_that_is_no_encoder_is_named(tiny_bert: Path, target: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no saved sentence-transformers model"):
        copy_files(tiny_bert, target)


def test_local_paths_in_settings_lose_their_folders(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config |= {
        "_name_or_path": "/home/zaphod/models/bert/",
        "task_specific": {"cache_dir": r"C:\Users\zaphod\cache", "prompt": "/home is a word"},
    }
    (source / "config.json").write_text(json.dumps(config))
    copy_files(source, target)
    cleaned = json.loads((target / "config.json").read_text())
    assert cleaned["_name_or_path"] == "bert"
    assert cleaned["task_specific"] == {"cache_dir": "cache", "prompt": "/home is a word"}


def test_an_adapter_on_a_local_base_is_refused(source: Path, target: Path) -> None:
    settings = {"base_model_name_or_path": "/home/zaphod/bert"}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"adapter needs the local folder '/home/zaphod/bert'"):
        copy_files(source, target)


def test_a_path_is_told_from_a_name() -> None:
    for path in ("/home/x", "~/x", "./x", "../x/y", r"C:\x", "D:/x", r"\\server\x", "~"):
        assert is_local(path), path
    for name in ("bert-base-uncased", "org/model", "a/b", "/", "https://x.y/z", ""):
        assert not is_local(name), name


def test_a_full_disk_is_told_beforehand(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes, and 1 are free"):
        copy_files(source, target)
    assert not any(target.iterdir())


SECRET = "hf_" + "Abcdefghij" * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", f"token={SECRET}", r"README.md holds an access token"),
        ("README.md", "my-own-secret-1", r"README.md holds your access token"),
        ("vocab.txt", "my-own-secret-1", r"vocab.txt holds your access token"),
        ("README.md", "see /home/zaphod/x", r"README.md names a folder .*\(/home/zaphod\)"),
        ("README.md", "see `/srv/data/run1/y`", r"README.md names a folder .*\(/srv/data/run1\)"),
        ("config.json", r'{"a": "C:\\Users\\zaphod"}', r"config.json names a folder"),
        ("1_Pooling/config.json", '{"a": "/Users/zaphod"}', r"1_Pooling/config.json names"),
    ],
)
def test_a_leak_is_found(target: Path, name: str, content: str, message: str) -> None:
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        refuse_leaks(target, ["my-own-secret-1"], [Path("/srv/data/run1")])
    assert SECRET not in str(caught.value) and "my-own-secret-1" not in str(caught.value)


def test_a_leak_in_the_weights_metadata_is_found(source: Path, target: Path) -> None:
    weights = load_file(source / "model.safetensors")
    save_file(weights, target / "model.safetensors", metadata={"from": "/home/zaphod/run"})
    with pytest.raises(ValueError, match=r"model.safetensors names a folder"):
        refuse_leaks(target, [], [])


def test_what_is_no_leak_passes(target: Path) -> None:
    (target / "README.md").write_text(
        "https://huggingface.co/home/x [a](https://a.b/root/c) and/or /home <root/x> /data/x"
    )
    (target / "vocab.txt").write_text("/home/zaphod\n")
    (target / "empty.txt").write_text("")
    refuse_leaks(target, ["a", "another-secret"], [Path("/"), Path("/data"), Path("/srv/x")])


def test_samples_leave_the_modes_alone(make_encoder: Callable[..., SentenceTransformer]) -> None:
    model = make_encoder().train()
    model[1].eval()
    vectors = encode_samples(model)
    assert model[0].training and not model[1].training
    assert np.array_equal(vectors, encode_samples(model))  # without dropout


@pytest.mark.slow
def test_a_folder_that_needs_this_package_is_refused(source: Path, tmp_path: Path) -> None:
    """Slow: starts a process that imports sentence-transformers. That it passes is shown by a push."""
    encode_samples(source)  # here it loads
    with pytest.raises(ValueError, match=r"does not load with sentence-transformers alone"):
        encode_alone(source, tmp_path)  # it names the head


def test_other_vectors_are_noticed() -> None:
    vectors = np.array([[1.0, -2.0]], dtype=np.float32)
    assert compare(vectors, vectors, exact=True) == 0
    assert compare(vectors, vectors * 1.01, exact=False) == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(ValueError, match=r"other vectors .*relative difference 0\.01"):
        compare(vectors, vectors * 1.01, exact=True)
    with pytest.raises(ValueError, match=r"other vectors .*nan"):
        compare(vectors, vectors * np.nan, exact=False)
    with pytest.raises(ValueError, match=r"vectors of 2 numbers, .* of 1"):
        compare(vectors, vectors[:, :1], exact=True)
