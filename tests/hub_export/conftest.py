"""A Hugging Face Hub on loopback: the endpoints that creating a repository, uploading a folder and loading it back need."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

TOKEN = "hf_dummy"


class FakeHub:
    """What a Hub keeps: repositories {repo_id: {"private": bool, "files": {name: bytes}}}, and the log of requests."""

    def __init__(self):
        self.repositories = {}
        self.objects = {}  # large files by sha256, before a commit names them
        self.requests = []
        self.user = "tester"
        self.fail_commits = False
        self.url = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_request(self):
        hub, path, body = self.server.hub, self.path.split("?")[0], self.body()
        hub.requests.append(f"{self.command} {path}")
        # Large files go to a signed address, as on the real Hub: without the token.
        if self.command == "PUT" and path.startswith("/storage/"):
            hub.objects[path.removeprefix("/storage/")] = body
            return self.answer({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": hub.user, "auth": {"type": "access_token"}})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        for name, handle in (("/preupload/", self.preupload), ("/commit/", self.commit)):
            if name in path:
                return handle(path.removeprefix("/api/models/").split(name)[0], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if "/resolve/" in path:
            return self.resolve(*path[1:].split("/resolve/main/"))
        if path.startswith("/api/models/"):
            return self.info(path.removeprefix("/api/models/").split("/revision/")[0])
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

    def info(self, repo_id):
        repository = self.server.hub.repositories.get(repo_id)
        if repository is None:
            return self.answer({"error": "Repository not found"}, 404)
        siblings = [{"rfilename": name} for name in repository["files"]]
        return self.answer({"id": repo_id, "private": repository["private"], "siblings": siblings, "sha": "0" * 40})

    def resolve(self, repo_id, name):
        content = self.server.hub.repositories.get(repo_id, {"files": {}})["files"].get(name)
        headers = {"X-Repo-Commit": "1" * 40, "ETag": f'"{hashlib.sha256(content or b"").hexdigest()}"'}
        if content is None:
            headers = {"X-Error-Code": "EntryNotFound" if repo_id in self.server.hub.repositories else "RepoNotFound"}
        self.send_response(200 if content is not None else 404)
        for header, value in (headers | {"Content-Length": str(len(content or b""))}).items():
            self.send_header(header, value)
        self.end_headers()
        if content and self.command == "GET":
            self.wfile.write(content)

    def preupload(self, repo_id, body):
        files = json.loads(body)["files"]
        modes = ["lfs" if file["path"].endswith((".safetensors", ".pt")) else "regular" for file in files]
        return self.answer(
            {"files": [{"path": f["path"], "uploadMode": mode, "shouldIgnore": False} for f, mode in zip(files, modes)]}
        )

    def batch(self, wanted):
        objects = [
            one | {"actions": {"upload": {"href": f"{self.server.hub.url}/storage/{one['oid']}"}}}
            for one in wanted["objects"]
        ]
        return self.answer({"transfer": "basic", "objects": objects})

    def commit(self, repo_id, body):
        hub = self.server.hub
        if hub.fail_commits:
            return self.answer({"error": "You have exceeded your storage limit"}, 403)
        files = hub.repositories[repo_id]["files"]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                content = hub.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = content
        commit = {"commitUrl": f"{hub.url}/{repo_id}/commit/1", "commitOid": "1" * 40, "success": True}
        return self.answer(commit)


@pytest.fixture
def fake_hub():
    """A running FakeHub; `.url` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = hub = FakeHub()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()
