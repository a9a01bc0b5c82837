"""A Hugging Face Hub on loopback for creating, uploading, asking and fetching, with faults on the way.

Large files go as LFS objects, whole or in parts, or in Xet's blocks, each to a storage that counts the bytes it receives.
"""

import base64
import hashlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import http_backoff

from headstart.hub_export import push
from headstart.tests.hub_export.small_exports import check, copy, exported, in_this_process  # noqa: F401

TOKEN = "hf_dummy"
LARGE = (".safetensors", ".pt")


@dataclass
class Fault:
    """A fault for requests that contain `match` ("PUT /storage/"), a given number of times.

    status: the answer; after: bytes of the body that are read before the connection is cut; stall: as `after`, and then nothing
    until `released`.
    """

    match: str
    times: int = 1
    status: int = 0
    after: int = 0
    stall: bool = False
    headers: dict = field(default_factory=dict)
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class FakeHub:
    """State of a Hub: repositories {repo_id: {"private": bool, "files": {name: bytes}}}, with "branches" beside main; and logs.

    uploads: (object or part, bytes received) of everything that was sent to the storage.
    """

    def __init__(self):
        self.repositories = {}
        self.objects = {}  # large files by sha256, before a commit names them
        self.parts = {}
        self.collections = {}  # slug -> {"title", "owner", "private", "items"}
        self.requests, self.uploads, self.faults = [], [], []
        self.user, self.role = "tester", "write"
        self.part_size = None  # bytes; objects above go in parts
        self.fail_commits = False
        self.ignored = ()  # names that a .gitignore there lists
        self.url = None

    def fail(self, match, **what):
        fault = Fault(match, **what)
        self.faults.append(fault)
        return fault

    def branches(self, repo_id):
        """{branch: files}, main among them."""
        repository = self.repositories[repo_id]
        return {"main": repository["files"]} | repository.setdefault("branches", {})

    def commit_of(self, repo_id, revision):
        """The commit of a branch, or the revision itself if it is a commit; None if there is none."""
        commits = {}
        for branch, files in self.branches(repo_id).items():
            told = "".join(f"{name} {oid(content)}\n" for name, content in sorted(files.items()))
            commits[branch] = hashlib.sha1(f"{repo_id}\n{told}".encode()).hexdigest()
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files_at(self, repo_id, revision):
        """The files of a branch or a commit, None if there is none."""
        branches = self.branches(repo_id)
        found = self.commit_of(repo_id, revision)
        return next((files for branch, files in branches.items() if found == self.commit_of(repo_id, branch)), None)

    def sent(self, content):
        """How often an object with these bytes was sent, and the total number of its bytes sent."""
        counts = [count for key, count in self.uploads if key.startswith(oid(content))]
        return len(counts), sum(counts)


def oid(content):
    return (
        hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else content["oid"]
    )  # Xet keeps no bytes here


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content, status=200, **headers):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read(self, limit=None):
        """The request's body, or its first `limit` bytes."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            length = int(self.headers.get("Content-Length", 0))
            return self.rfile.read(length if limit is None else min(limit, length))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def handle_request(self):
        hub, address = self.server.hub, urlsplit(self.path)
        path, self.query = address.path, parse_qs(address.query)
        line = f"{self.command} {path}"
        hub.requests.append(line)
        fault = next((one for one in hub.faults if one.times and one.match in line), None)
        body = self.read(fault.after if fault and not fault.status else None)
        if self.command == "PUT" or "/xorbs/" in path:
            hub.uploads.append((path.split("/", 2)[2], len(body)))
        if fault:
            fault.times -= 1
            fault.reached.set()
            if fault.stall:
                fault.released.wait(60)
            if fault.status:
                return self.answer({"error": "as the test wants it"}, fault.status, **fault.headers)
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        # Large files go to signed addresses, as on the real Hub: without the token.
        if path.startswith(("/storage/", "/v1/", "/v2/")):
            return self.store(path, body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/whoami-v2":
            token = {"type": "access_token", "accessToken": {"displayName": "test", "role": hub.role}}
            return self.answer({"type": "user", "name": hub.user, "auth": token})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path.startswith("/api/collections"):
            return self.collection(path.removeprefix("/api/collections").strip("/"), body)
        for name, handle in (
            ("preupload", self.preupload),
            ("commit", self.commit),
            ("branch", self.branch),
            ("revision", self.info),
            ("xet-write-token", self.xet_token),
        ):
            if path.startswith("/api/models/") and f"/{name}/" in path:
                repo_id, revision = path.removeprefix("/api/models/").split(f"/{name}/")
                return handle(repo_id, unquote(revision), body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if "/resolve/" in path:
            repo_id, place = path[1:].split("/resolve/")
            return self.resolve(repo_id, *map(unquote, place.split("/", 1)))
        if path.startswith("/api/models/"):
            return self.info(path.removeprefix("/api/models/"), "main", body)
        return self.answer({"error": f"this Hub has no {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def create(self, wanted):
        hub = self.server.hub
        repo_id = f"{wanted.get('organization') or hub.user}/{wanted['name']}"
        # huggingface_hub 1 sent "private" at first, "visibility" since.
        private = wanted.get("private", wanted.get("visibility") == "private")
        address = {"url": f"{hub.url}/{repo_id}"}
        if repo_id in hub.repositories:
            return self.answer(address | {"error": "You already created this model repo"}, 409)
        hub.repositories[repo_id] = {"private": private, "files": {}}
        return self.answer(address)

    def branch(self, repo_id, name, body):
        branches = self.server.hub.branches(repo_id)
        if name in branches:
            return self.answer({"error": "Reference already exists"}, 409)
        start = json.loads(body or "{}").get("startingPoint", "main")
        self.server.hub.repositories[repo_id]["branches"][name] = dict(branches[start])
        return self.answer({})

    def info(self, repo_id, revision, body):
        hub = self.server.hub
        if repo_id not in hub.repositories:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        files = hub.files_at(repo_id, revision)
        if files is None:
            return self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        siblings = [{"rfilename": name} for name in files]
        if "blobs" in self.query:
            for one, (name, content) in zip(siblings, files.items()):
                if name.endswith(LARGE):
                    one["size"] = content["size"] if isinstance(content, dict) else len(content)
                    one["lfs"] = {"sha256": oid(content), "size": one["size"], "pointerSize": 134}
                    one["blobId"] = "0" * 40
                else:
                    one["size"] = len(content)
                    one["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        private, sha = hub.repositories[repo_id]["private"], hub.commit_of(repo_id, revision)
        return self.answer({"id": repo_id, "private": private, "siblings": siblings, "sha": sha})

    def resolve(self, repo_id, revision, name):
        hub, files = self.server.hub, None
        if repo_id in hub.repositories:
            files = hub.files_at(repo_id, revision)
        content = (files or {}).get(name)
        if content is None:
            missing = "Entry" if files is not None else "Revision" if repo_id in hub.repositories else "Repo"
            headers = {"X-Error-Code": f"{missing}NotFound"}
        else:
            headers = {"ETag": f'"{oid(content)}"'}
        if files is not None:
            headers["X-Repo-Commit"] = hub.commit_of(repo_id, revision)
        self.send_response(200 if content is not None else 404)
        for header, value in (headers | {"Content-Length": str(len(content or b""))}).items():
            self.send_header(header, value)
        self.end_headers()
        if content and self.command == "GET":
            self.wfile.write(content)

    def preupload(self, repo_id, revision, body):
        files = json.loads(body)["files"]
        modes = ["lfs" if file["path"].endswith(LARGE) else "regular" for file in files]
        return self.answer(
            {
                "files": [
                    {"path": f["path"], "uploadMode": mode, "shouldIgnore": f["path"] in self.server.hub.ignored}
                    for f, mode in zip(files, modes)
                ]
            }
        )

    def batch(self, wanted):
        """Upload addresses of missing objects; objects above part_size get one per part."""
        hub, objects = self.server.hub, []
        for one in wanted["objects"]:
            upload = {"href": f"{hub.url}/storage/{one['oid']}"}
            if hub.part_size and one["size"] > hub.part_size:
                count = -(-one["size"] // hub.part_size)
                parts = {f"{n:05}": f"{hub.url}/storage/{one['oid']}/{n}" for n in range(1, count + 1)}
                upload["header"] = {"chunk_size": str(hub.part_size)} | parts
            objects.append(one if one["oid"] in hub.objects else one | {"actions": {"upload": upload}})
        return self.answer({"transfer": "basic", "objects": objects})

    def store(self, path, body):
        """A storage's answer: an object, a part of one, the end of the parts, or Xet's blocks (which it only counts)."""
        hub = self.server.hub
        if "/xorbs/" in path:
            return self.answer({"was_inserted": True})
        if path == "/v1/shards":
            return self.answer({"result": 1})
        if not path.startswith("/storage/"):
            return self.answer({}, 404)
        key, _, part = path.removeprefix("/storage/").partition("/")
        if part:
            hub.parts[key, int(part)] = body
            return self.answer({}, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        if self.command == "POST":
            numbers = [one["partNumber"] for one in json.loads(body)["parts"]]
            body = b"".join(hub.parts[key, number] for number in numbers)
        hub.objects[key] = body
        return self.answer({})

    def xet_token(self, repo_id, revision, body):
        url, ends = self.server.hub.url, int(time.time()) + 3600
        headers = {"X_Xet_Cas_Url": url, "X_Xet_Access_Token": "xet", "X_Xet_Token_Expiration": ends}
        return self.answer({"casUrl": url, "accessToken": "xet", "exp": ends}, **headers)

    def commit(self, repo_id, revision, body):
        hub = self.server.hub
        if hub.fail_commits:
            return self.answer({"error": "You have exceeded your storage limit"}, 403)
        files = hub.branches(repo_id)[revision]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                content = hub.objects.get(value["oid"], {"oid": value["oid"], "size": value["size"]})
                assert oid(content) == value["oid"]
                files[value["path"]] = content
        sha = hub.commit_of(repo_id, revision)
        return self.answer({"commitUrl": f"{hub.url}/{repo_id}/commit/{sha}", "commitOid": sha, "success": True})

    def collection(self, slug, body):
        hub = self.server.hub

        def told(slug):
            fixed = {"lastUpdated": "2026-01-01T00:00:00.000Z", "theme": "blue", "upvotes": 0}
            return {"slug": slug} | hub.collections[slug] | fixed

        if not slug and self.command == "GET":
            owner = self.query["owner"][0]
            # Without positions: the client counts them itself.
            return self.answer([told(slug) for slug, one in hub.collections.items() if one["owner"] == owner])
        if not slug:
            wanted = json.loads(body)
            slug = f"{wanted['namespace']}/{wanted['title'].lower().replace(' ', '-')}-0123"
            one = {"title": wanted["title"], "owner": wanted["namespace"], "private": wanted["private"], "items": []}
            hub.collections[slug] = one
            return self.answer(told(slug) | {"position": 0})
        slug = slug.removesuffix("/items")
        if slug not in hub.collections:
            return self.answer({"error": "Collection not found"}, 404)
        if self.command == "POST":
            held, item = hub.collections[slug]["items"], json.loads(body)["item"]
            if item["id"] in [one["id"] for one in held]:
                return self.answer({"error": "already in the collection"}, 409)
            held.append({"_id": str(len(held)), "position": len(held), **item})
        return self.answer(told(slug) | {"position": 0})


@pytest.fixture
def fake_hub():
    """A running FakeHub; `.url` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = hub = FakeHub()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    for fault in hub.faults:
        fault.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub_here(fake_hub, tmp_path, monkeypatch):
    """The FakeHub as the Hub of this process, with an empty cache, a token, no Xet, and hardly a pause between attempts."""
    monkeypatch.setattr(constants, "ENDPOINT", fake_hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake_hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(push, "PAUSES", (0, 0, 0))
    monkeypatch.setitem(http_backoff.__kwdefaults__, "base_wait_time", 0)
    return fake_hub
