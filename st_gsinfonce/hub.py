"""Push an encoder to the Hugging Face Hub: stripped, checked, with a card, in one commit."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer

from st_gsinfonce.bundle import (
    compare,
    copy_files,
    encode_alone,
    encode_samples,
    is_exact,
    modes_kept,
    refuse_leaks,
)
from st_gsinfonce.card import Facts, write_card
from st_gsinfonce.encoder import TRAINING_FILES
from st_gsinfonce.evaluation import STSResults
from st_gsinfonce.remote import (
    Remote,
    check_remote,
    check_repo_id,
    hub_explained,
    look,
    read_card,
    require_token,
)

# Files of an encoder that an update must not leave behind: they would be loaded in place of the new ones.
STALE = (
    *("*.safetensors", "*.json", "vocab.txt", "merges.txt", "*.model", "*.jinja"),
    *("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", *TRAINING_FILES),
)


@dataclass(frozen=True)
class Publication:
    """What is pushed where. ``str()`` lists it.

    Attributes:
        repo_id: The repository.
        private: Whether only its owner sees it.
        update: Whether it existed, with an encoder in it.
        files: Size in bytes by path in the repository.
        removed: Files of the repository that the same commit deletes, since they belong to the encoder
            that was there before.
        left_out: What the folder holds and the hub does not get.
        difference: Largest difference between the vectors of the encoder given and of what is pushed,
            relative to the largest number in them.
        card: Text of the model card.
        folder: What a dry run leaves on the disk, else None.
        commit_url: Address of the commit, None before it is made.
    """

    repo_id: str
    private: bool
    update: bool
    files: Mapping[str, int]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    difference: float
    card: str
    folder: Path | None = None
    commit_url: str | None = None

    def __str__(self) -> str:
        """Return what goes where, one file a line."""
        visibility = "private" if self.private else "PUBLIC: everyone can download it"
        width = max(len(f"{size:,}") for size in self.files.values())
        return "\n".join(
            [
                f"{self.repo_id} ({'update' if self.update else 'new'}, {visibility})",
                *(f"  {size:>{width},}  {name}" for name, size in self.files.items()),
                *(f"  {'removed':>{width}}  {name}" for name in self.removed),
                f"  {sum(self.files.values()):>{width},}  bytes in {len(self.files)} files, one commit",
                *([f"stays here: {', '.join(self.left_out)}"] if self.left_out else []),
                "loads with sentence-transformers alone; vectors differ by "
                f"{self.difference:.1g} from the encoder given",
            ]
        )


def push_encoder(
    model_or_folder: SentenceTransformer | str | PathLike[str],
    repo_id: str,
    results: STSResults | None = None,
    private: bool = True,
    *,
    baseline: STSResults | None = None,
    run: Mapping[str, Any] | str | PathLike[str] | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | None = None,
    update: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
    commit_message: str | None = None,
    show: Callable[[str], object] = print,
) -> Publication:
    """Push an encoder to the hub, without the train-only head, as sentence-transformers alone loads it.

    Everything is prepared and checked in a temporary folder; what is given stays as it is. Pushed are
    safetensors, settings, vocabularies and texts, never anything that can run code. A new process that
    cannot import this package loads them and must encode to the same vectors. No file may hold a token
    or a path of this machine. What was made without a fault then goes up in one commit: an
    interrupted push leaves at most an empty repository, and the same call completes it.

    Args:
        model_or_folder: An encoder, or a folder of one: a checkpoint, too.
        repo_id: ``organisation/model`` or ``user/model``.
        results: Its scores, for the card.
        private: Whether only the owner may see the repository. An existing one must already be so.
        baseline: Scores of the encoder that it was trained from, for the table before and after.
        run: What it was trained with, as ``run.json`` of ``examples/train_unsup.py`` holds it, or the
            path of such a file. Paths in it are reduced to their last part.
        base_model: Name on the hub of the encoder that it was trained from.
        license: Identifier of the licence, such as ``"apache-2.0"``.
        language: Code of the language, such as ``"en"``.
        update: Push to a repository that holds an encoder. The text of its card stays, but for the part
            that this function writes; files of the encoder before are deleted in the same commit.
        dry_run: Prepare and check, leave the folder, push nothing. Without ``update`` it needs no
            network and no token.
        token: Access token; None takes that of ``hf auth login`` or of ``HF_TOKEN``.
        endpoint: Address of the hub; None takes ``HF_ENDPOINT`` or the public one.
        commit_message: First line of the commit.
        show: Receives the list of what will be pushed, before it is. An exception stops the push.

    Returns:
        What was pushed, or with ``dry_run`` what would be.

    Raises:
        ValueError: For a repo id that is none, a visibility that the repository does not have,
            something executable, a token or a local path in a file, an encoder that does not load or
            encode as given, or scores of different tasks.
        FileNotFoundError: If the folder or the file of the run does not exist.
        FileExistsError: If the repository holds something and ``update`` is not set.
        PermissionError: Without a token, or with one that may not write there.
        ConnectionError: If the hub cannot be reached or the connection breaks.
        OSError: If the disk is full.

    Example:
        >>> push_encoder("runs/mine/encoder", "me/my-encoder", dry_run=True)  # doctest: +SKIP
    """
    check_repo_id(repo_id)
    facts = Facts(repo_id, results, baseline, _read_run(run), base_model, license, language)
    if not isinstance(model_or_folder, SentenceTransformer):
        model_or_folder = Path(model_or_folder)
    api = HfApi(endpoint=endpoint, token=token)
    remote = None
    if update or not dry_run:
        require_token(token)
        remote = look(api, repo_id)
        check_remote(remote, repo_id, private, update)
    scratch = Path(tempfile.mkdtemp(prefix="st_gsinfonce-"))
    keep = False
    try:
        with _disk_explained(scratch):
            published = read_card(api, repo_id, remote, scratch)
            publication = _prepare(model_or_folder, facts, published, private, remote, scratch)
        refuse_leaks(
            scratch / "upload",
            filter(None, [token, get_token()]),
            [Path.home(), Path.cwd(), scratch, *_place(model_or_folder)],
        )
        show(str(publication))
        if dry_run:
            keep = True
            return replace(publication, folder=scratch / "upload")
        message = commit_message or f"{'Update' if publication.update else 'Add'} the encoder"
        url = _commit(api, publication, remote, scratch / "upload", message)
        return replace(publication, commit_url=url)
    finally:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)


def _read_run(run: Mapping[str, Any] | str | PathLike[str] | None) -> Mapping[str, Any] | None:
    if run is None or isinstance(run, Mapping):
        return run
    path = Path(run)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"run: {path} is no JSON file: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"run: {path} holds no object with settings, loss and trainer")
    return record


def _place(model_or_folder: SentenceTransformer | Path) -> list[Path]:
    return [] if isinstance(model_or_folder, SentenceTransformer) else [model_or_folder.absolute()]


def _prepare(
    model_or_folder: SentenceTransformer | Path,
    facts: Facts,
    published: str | None,
    private: bool,
    remote: Remote | None,
    scratch: Path,
) -> Publication:
    """Fill ``scratch / "upload"`` and check it."""
    upload = scratch / "upload"
    upload.mkdir()
    if isinstance(model_or_folder, SentenceTransformer):
        saved = scratch / "saved"
        with modes_kept(model_or_folder):  # its card encodes an example
            model_or_folder.save_pretrained(str(saved))
        left_out = copy_files(saved, upload, move=True)
    else:
        left_out = copy_files(model_or_folder, upload)
    model = SentenceTransformer(str(upload), device="cpu", local_files_only=True)
    given = model_or_folder if isinstance(model_or_folder, SentenceTransformer) else model
    difference = compare(
        encode_samples(model_or_folder),
        encode_alone(upload, scratch),
        exact=is_exact(model) and is_exact(given),
    )
    readme = upload / "README.md"
    written = readme.read_text(encoding="utf-8") if readme.is_file() else None
    card = write_card(model, facts, written, published)
    readme.write_text(card, encoding="utf-8")
    files = {
        path.relative_to(upload).as_posix(): path.stat().st_size
        for path in sorted(upload.rglob("*"))
        if path.is_file()
    }
    return Publication(
        repo_id=facts.repo_id,
        private=private,
        update=remote is not None and not remote.is_empty,
        files=files,
        removed=tuple(name for name in remote.files if name not in files and _is_stale(name))
        if remote
        else (),
        left_out=left_out,
        difference=difference,
        card=card,
    )


def _is_stale(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return re.fullmatch(r"(\d+_\w+(/.*)?)?", folder) is not None and any(
        fnmatch(file, pattern) for pattern in STALE
    )


@contextmanager
def _disk_explained(scratch: Path) -> Iterator[None]:
    """Say of a write that failed for want of space where it was to go."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        in_words = re.search(r"os error (\d+)", str(error))  # as safetensors reports it
        number = getattr(error, "errno", None) or (int(in_words[1]) if in_words else None)
        if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            number,
            f"the copy to push could not be written to {scratch} "
            f"({getattr(error, 'strerror', None) or error}): free some disk, or set TMPDIR to another; "
            "nothing was pushed and the encoder given is as it was",
        ) from error


def _commit(
    api: HfApi, publication: Publication, remote: Remote | None, folder: Path, message: str
) -> str:
    repo_id = publication.repo_id
    with hub_explained(repo_id):
        if remote is None:
            api.create_repo(repo_id, private=publication.private)
    if remote is None:
        remote = look(api, repo_id)
        if remote is None or remote.private != publication.private:
            raise PermissionError(
                f"the hub made {repo_id} with another visibility than private={publication.private}, or "
                "hides it: nothing was pushed; look at the settings of the repository or organisation"
            )
    additions = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name))
        for name in publication.files
    ]
    deletions = [CommitOperationDelete(path_in_repo=name) for name in publication.removed]
    with hub_explained(repo_id):
        commit = api.create_commit(
            repo_id,
            [*additions, *deletions],
            commit_message=message,
            parent_commit=remote.sha,
        )
    return os.fspath(commit.commit_url)
