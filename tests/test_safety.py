"""Loading is careful.

- Nothing here trusts remote code for the user, turns off weights-only loading, runs text as code or
  starts a shell; a script that comes with a corpus is never run.
- A checkpoint that somebody tampered with runs nothing when a training is resumed from it, or when an
  encoder is loaded from it.
"""

from __future__ import annotations

import ast
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_gsinfonce import build_encoder, build_trainer, load_encoder, load_sentences

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("st_gsinfonce", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
UNSAFE = {"trust_remote_code", "weights_only", "allow_pickle", "shell"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
# Names, not attributes: model.eval() and re.compile() are others.
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
STARTS_A_SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def unsafe(source: str) -> list[str]:
    """Return what trusts, runs text or starts a shell: keywords, modules and functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in UNSAFE:
            safe = node.arg == "weights_only"
            if not (isinstance(node.value, ast.Constant) and node.value.value is safe):
                found.append(str(node.arg))
        elif isinstance(node, ast.Dict):
            found += [
                k.value for k in node.keys if isinstance(k, ast.Constant) and k.value in UNSAFE
            ]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
            module = getattr(node, "module", None)
            found += [name for name in names if f"{module}.{name}" in STARTS_A_SHELL]
        elif isinstance(node, ast.Name) and node.id in RUNS_TEXT:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in STARTS_A_SHELL:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            if not any(keyword.arg == "weights_only" for keyword in node.keywords):
                found.append("torch.load")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_is_trusted_run_or_handed_to_a_shell(path: Path) -> None:
    assert unsafe(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "f(trust_remote_code=True)",
        "f(trust_remote_code=x)",
        "f(**{'trust_remote_code': True})",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "import pickle",
        "from joblib import load",
        "import yaml",
        "eval(x)",
        "exec(x)",
        "run = exec",
        "__import__(x)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, **{'shell': True})",
        "os.system(x)",
        "from os import system",
        "from subprocess import getoutput as run",
    ],
)
def test_trust_would_be_found(source: str) -> None:
    assert unsafe(source)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        """Say what to call with what."""
        return exec, (f"open({str(self.mark)!r}, 'w').write('ran')",)


@pytest.fixture
def arguments(tmp_path: Path) -> SentenceTransformerTrainingArguments:
    return SentenceTransformerTrainingArguments(
        str(tmp_path / "run"),
        per_device_train_batch_size=16,
        max_steps=2,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )


def test_the_payload_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark"), protocol=2))
    assert (tmp_path / "mark").read_text() == "ran"


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("training_args.bin", False),  # never read
        ("optimizer.pt", True),
        ("scheduler.pt", True),
        ("rng_state.pth", True),
    ],
)
def test_resuming_runs_nothing(
    name: str,
    refused: bool,
    tiny_bert: Path,
    tmp_path: Path,
    sentences: list[str],
    arguments: SentenceTransformerTrainingArguments,
) -> None:
    build_trainer(build_encoder(tiny_bert, seed=0, device="cpu"), sentences, arguments).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert (checkpoint / name).is_file()  # what a checkpoint really has
    mark = tmp_path / "mark"
    (checkpoint / name).write_bytes(pickle.dumps(Payload(mark), protocol=2))
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")

    arguments.resume_from_checkpoint = str(checkpoint)
    trainer = build_trainer(build_encoder(tiny_bert, seed=0, device="cpu"), sentences, arguments)
    if refused:
        with pytest.raises(pickle.UnpicklingError, match="(?i)weights.only"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 2
    assert not mark.exists()


def test_loading_runs_nothing(
    make_encoder: Callable[..., SentenceTransformer], tmp_path: Path
) -> None:
    folder = tmp_path / "encoder"
    make_encoder().save_pretrained(str(folder))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "mark"), protocol=2))
    with pytest.raises(Exception, match="(?i)weights.only|unpickl|pytorch_model.bin"):
        load_encoder(folder, device="cpu")
    assert not (tmp_path / "mark").exists()


def test_a_name_as_on_the_hub_runs_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "galaxy" / "towel"  # what "galaxy/towel" means here
    folder.mkdir(parents=True)
    mark = tmp_path / "mark"
    (folder / "towel.py").write_text(f"open({str(mark)!r}, 'w')", encoding="utf-8")
    (folder / "data.csv").write_text("text\nIt rains.\n", encoding="utf-8")
    for source in ("galaxy/towel", "galaxy/towel/towel.py"):
        with pytest.raises(ValueError, match="never run"):
            load_sentences(source)
    assert not mark.exists()
