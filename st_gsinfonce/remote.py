"""A repository on the hub as it stands, and its refusals in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, made lazily


@dataclass(frozen=True)
class Remote:
    """A repository as it stands.

    Attributes:
        sha: Its newest commit.
        private: Whether only its owner sees it.
        files: Paths of its files.
    """

    sha: str
    private: bool
    files: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was pushed to it yet, as after a push that broke off."""
        return set(self.files) <= {".gitattributes"}


def check_repo_id(repo_id: str) -> None:
    """Check a repo id without asking the hub.

    Raises:
        ValueError: If it is none, or has no user or organisation.
    """
    try:
        validate_repo_id(repo_id)
        valid = repo_id.count("/") == 1
        reason = "the part before the slash is missing"
    except ValueError as error:
        valid, reason = False, str(error)
    if not valid:
        raise ValueError(
            f"repo_id must be USER/MODEL or ORGANISATION/MODEL, got {repo_id!r}: {reason}"
        )


def require_token(token: str | None) -> None:
    """Check that there is an access token.

    Raises:
        PermissionError: If none is given and none is stored.
    """
    if not (token or get_token()):
        raise PermissionError(
            "there is no access token: make one that may write at https://huggingface.co/settings/tokens, "
            "then run `hf auth login`, or set HF_TOKEN"
        )


def look(api: HfApi, repo_id: str) -> Remote | None:
    """Return the repository as it stands, None if there is none that the token may see.

    Raises:
        PermissionError: If the hub does not accept the token.
        ConnectionError: If the hub cannot be reached.
    """
    with hub_explained(repo_id):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            return None
        files = tuple(sibling.rfilename for sibling in info.siblings or [])
        return Remote(str(info.sha), bool(info.private), files)


def check_remote(remote: Remote | None, repo_id: str, private: bool, update: bool) -> None:
    """Check that a push would neither overwrite nor expose something unasked.

    Raises:
        FileExistsError: If the repository holds something and ``update`` is not set.
        ValueError: If it is not as private as asked for.
    """
    if remote is None:
        return
    if not remote.is_empty and not update:
        raise FileExistsError(
            f"the repository {repo_id} exists and holds {len(remote.files)} files: choose another name, or "
            "push with update=True"
        )
    if remote.private != private:
        names = {True: "private", False: "public"}
        raise ValueError(
            f"the repository {repo_id} is {names[remote.private]}, but private={private} was asked for: "
            f"pass private={remote.private}, or change it in the repository's settings first"
        )


def read_card(api: HfApi, repo_id: str, remote: Remote | None, scratch: Path) -> str | None:
    """Return the README.md of the repository, None if it has none."""
    if remote is None or "README.md" not in remote.files:
        return None
    with hub_explained(repo_id):
        path = api.hf_hub_download(
            repo_id, "README.md", revision=remote.sha, local_dir=scratch / "published"
        )
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


@contextmanager
def hub_explained(repo_id: str) -> Iterator[None]:
    """Turn what the hub's client raises into errors that say what to do."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConnectionError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed: unset it"
        ) from error
    except HfHubHTTPError as error:
        raise _refused(repo_id, error) from error
    except ValueError:
        raise
    except Exception as error:  # of the client's HTTP library, whose classes differ by release
        reason = error.__cause__ or error
        raise ConnectionError(
            f"the hub could not be reached, or the connection broke ({type(reason).__name__}: {reason}). "
            "No commit was seen to arrive and nothing changed here: push again"
        ) from error


def _refused(repo_id: str, error: HfHubHTTPError) -> OSError:
    status = error.response.status_code
    said = error.server_message or str(error).strip().splitlines()[0]
    if status == 401:
        return PermissionError(
            f"the hub does not accept the access token ({said}): it may be mistyped, expired or revoked; "
            "run `hf auth login` with one that may write, or set HF_TOKEN"
        )
    if status == 403:
        return PermissionError(
            f"the access token may not write to {repo_id} ({said}): use one with write permission, and "
            "check the name before the slash"
        )
    if status == 409:
        return FileExistsError(f"the repository {repo_id} exists, but cannot be seen ({said})")
    if status == 412:
        return ConnectionError(f"{repo_id} was changed by someone else in the meantime: push again")
    return ConnectionError(f"the hub answered {status} for {repo_id} ({said}): push again later")
