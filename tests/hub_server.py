"""A stand-in for the Hugging Face Hub on 127.0.0.1, as far as huggingface_hub's client speaks to it.

It keeps models in memory: creating, visibility, access tokens, commits with their parent, large files by
the LFS protocol, checking of a card's metadata, listing and downloading. It can cut a connection in the
middle of a request's body. Whatever it is asked beyond that is a 404.

    with HubServer({"hf_token": {"me"}}) as hub:
        HfApi(endpoint=hub.endpoint, token="hf_token").create_repo("me/model")
        hub.repositories["me/model"].files
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

LARGE = 10_000  # bytes from which on a file goes by LFS
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Repository:
    """A model repository: its files, and what each commit did."""

    private: bool
    files: dict[str, bytes] = field(
        default_factory=lambda: {".gitattributes": b"*.safetensors lfs\n"}
    )
    commits: list[dict[str, Any]] = field(default_factory=lambda: [{"summary": "initial commit"}])

    @property
    def sha(self) -> str:
        """The newest commit, as 40 hexadecimal digits."""
        return hashlib.sha1(json.dumps(self.commits).encode()).hexdigest()


def answer(value: Any, status: int = 200, **headers: str) -> Answer:
    content = {
        "Content-Type": "application/json",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    return status, content, json.dumps(value).encode()


def refuse(status: int, code: str, message: str) -> Answer:
    return answer({"error": message}, status, X_Error_Code=code, X_Error_Message=message)


class HubServer:
    """The server; ``tokens`` gives the names that each access token may write to."""

    def __init__(self, tokens: dict[str, set[str]]) -> None:
        self.tokens = tokens
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cuts: list[tuple[str, int]] = []
        self.races: set[str] = set()  # repositories that somebody else commits to just before
        self.lock = threading.Lock()
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        """Start to serve."""
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self.server.shutdown()
        self.server.server_close()

    def cut(self, request: str, times: int = 1) -> None:
        """Break the connection halfway through the body of requests that match, so many times."""
        self.cuts.append((request, times))

    def takes_cut(self, request: str) -> bool:
        with self.lock:
            for index, (pattern, times) in enumerate(self.cuts):
                if times and re.match(pattern, request):
                    self.cuts[index] = (pattern, times - 1)
                    return True
        return False


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    routes: tuple[tuple[str, str], ...] = (
        (r"POST /api/repos/create", "create"),
        (r"POST /api/validate-yaml", "validate"),
        (r"GET /api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", "info"),
        (r"POST /api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
        (r"POST /api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
        (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        (r"PUT /objects/(\w+)", "store"),
        (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    )

    def log_message(self, *arguments: object) -> None:
        """Stay silent."""

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        size = int(self.headers.get("Content-Length", 0))
        if self.hub.takes_cut(request):
            self.rfile.read(size // 2)
            reset = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(size)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            message = "Invalid credentials in Authorization header"
            self.send(answer({"error": message}, 401, X_Error_Message=message))
            return
        for pattern, name in self.routes:
            if match := re.fullmatch(pattern, request):
                with self.hub.lock:
                    reply: Callable[..., Answer] = getattr(self, name)
                    result = reply(token, body, *match.groups())
                self.send(result)
                return
        self.send(refuse(404, "NotFound", "no such address"))

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def send(self, result: Answer) -> None:
        status, headers, body = result
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def visible(self, token: str, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found and found.private and name.split("/")[0] not in self.hub.tokens.get(token, ()):
            return None
        return found

    def may_write(self, token: str, name: str) -> bool:
        return name.split("/")[0] in self.hub.tokens.get(token, ())

    def create(self, token: str, body: bytes) -> Answer:
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if not token:
            return refuse(401, "", "Invalid username or password.")
        if not self.may_write(token, name):
            return refuse(403, "", f"You don't have the rights to create a model under {name}")
        if name in self.hub.repositories:
            return refuse(409, "", "You already created this model repo")
        private = wanted.get("private", wanted.get("visibility") == "private")
        self.hub.repositories[name] = Repository(private)
        return answer({"url": f"{self.hub.endpoint}/{name}", "name": name})

    def validate(self, token: str, body: bytes) -> Answer:
        try:
            ModelCard(json.loads(body)["content"])
        except Exception as error:
            return answer({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return answer({"errors": [], "warnings": []})

    def info(self, token: str, body: bytes, name: str, revision: str | None) -> Answer:
        repository = self.visible(token, name)
        if repository is None:
            return refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        return answer(
            {
                "id": name,
                "modelId": name,
                "sha": repository.sha,
                "private": repository.private,
                "tags": [],
                "siblings": [{"rfilename": path} for path in repository.files],
            }
        )

    def preupload(self, token: str, body: bytes, name: str, revision: str) -> Answer:
        if not self.may_write(token, name):
            return refuse(403, "", "write access is missing")
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return answer({"files": files})

    def batch(self, token: str, body: bytes, name: str) -> Answer:
        objects = []
        for wanted in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.hub.endpoint}/objects/{wanted['oid']}"}}
            stored = wanted["oid"] in self.hub.objects
            objects.append({**wanted, **({} if stored else {"actions": action})})
        return answer({"transfer": "basic", "objects": objects})

    def store(self, token: str, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return refuse(400, "", "the hash is another")
        self.hub.objects[oid] = body
        return answer({})

    def commit(self, token: str, body: bytes, name: str, revision: str) -> Answer:
        repository = self.hub.repositories[name]
        if name in self.hub.races:
            self.hub.races.remove(name)
            repository.commits.append({"summary": "somebody else's"})
        header, *operations = [json.loads(line) for line in body.splitlines()]
        parent = header["value"].pop("parentCommit", None)
        if parent not in (None, repository.sha):
            return refuse(412, "", "A commit has happened since")
        files = dict(repository.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        repository.commits.append(header["value"])
        url = f"{self.hub.endpoint}/{name}/commit/{repository.sha}"
        return answer({"commitUrl": url, "commitOid": repository.sha})

    def resolve(self, token: str, body: bytes, name: str, revision: str, path: str) -> Answer:
        repository = self.visible(token, name)
        if repository is None:
            return refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if path not in repository.files:
            return refuse(404, "EntryNotFound", "Entry not found")
        content = repository.files[path]
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": repository.sha, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        return 200, headers, content
