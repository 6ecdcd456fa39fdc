"""
A local Hub: the part of its protocol that pushing to and loading from a repository takes.

Repositories are in memory. `.safetensors` files travel as LFS objects, as they do on the Hub: uploaded on their own and
named by the commit, and served by redirection.
"""

import base64
import hashlib
import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants


TOKEN = "hf_nobody"


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server, parts = self.server, self.parts()
        if parts[0] == "cdn":
            self.send(server.objects[parts[1]], {"ETag": f'"{parts[1]}"'})
        elif parts[:2] == ["api", "models"] and len(parts) >= 4 and "/".join(parts[2:4]) in server.repos:
            files = server.repos["/".join(parts[2:4])]
            if len(parts) > 4 and parts[4] == "tree":
                self.answer([self.entry(name, content) for name, content in files.items()])
            else:
                siblings = [{"rfilename": name} for name in files]
                repo = "/".join(parts[2:4])
                self.answer({"id": repo, "modelId": repo, "sha": server.sha, "siblings": siblings, "tags": []})
        elif "resolve" in parts[2:3] and "/".join(parts[4:]) in server.repos.get("/".join(parts[:2]), {}):
            name = "/".join(parts[4:])
            content = server.repos["/".join(parts[:2])][name]
            digest = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": server.sha, "ETag": f'"{digest[:40]}"'}
            if is_lfs(name):
                headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
                # Redirections to the same host would be followed by the request for metadata too
                self.send(b"", {**headers, "Location": f"http://localhost:{server.server_port}/cdn/{digest}"}, 302)
            else:
                self.send(content, headers)
        else:
            repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
            code = "EntryNotFound" if repo in server.repos else "RepoNotFound"
            self.send(b"{}", {"X-Error-Code": code, "X-Error-Message": f"nothing at {self.path}"}, 404)

    def do_PUT(self):
        content = self.body()
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.send(b"")

    def do_POST(self):
        body, server, parts = self.body(), self.server, self.parts()
        if self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            created = json.loads(body)
            repo = f"{created.get('organization') or 'someone'}/{created['name']}"
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.send(b"", {"X-Error-Message": f"You have no rights to create {repo}"}, 403)
                return
            status = 409 if repo in server.repos else 200
            server.created.append(created)
            server.repos.setdefault(repo, {})
            self.answer({"url": f"{server.url}/{repo}", "id": repo, "name": repo}, status)
        elif "preupload" in parts:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": f, "uploadMode": "lfs" if is_lfs(f) else "regular", "shouldIgnore": False} for f in files
            ]
            self.answer({"files": modes})
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            wanted = json.loads(body)["objects"]
            self.answer(
                {
                    "transfer": "basic",
                    "objects": [
                        {**o, "actions": {"upload": {"href": f"{server.url}/upload/{o['oid']}"}}} for o in wanted
                    ],
                }
            )
        elif "commit" in parts:
            self.commit("/".join(parts[2:4]), [json.loads(line) for line in body.decode().splitlines()])
        else:
            self.answer({"error": f"nothing at {self.path}"}, 404)

    def commit(self, repo, operations):
        server = self.server
        if server.refuses_commits:
            self.send(b"", {"X-Error-Message": "The storage is full"}, 403)
            return
        files, deleted = {}, []
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = server.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                deleted.append(value["path"])
        server.repos[repo].update(files)
        for path in deleted:
            del server.repos[repo][path]
        server.commits.append(sorted(files))
        server.states.append(dict(server.repos[repo]))
        url = f"{server.url}/{repo}/commit/{server.sha}"
        self.answer({"commitUrl": url, "commitOid": server.sha, "hookOutput": ""})

    @staticmethod
    def entry(name, content):
        digest = hashlib.sha256(content).hexdigest()
        lfs = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}} if is_lfs(name) else {}
        return {"type": "file", "oid": digest[:40], "size": len(content), "path": name, **lfs}

    def parts(self):
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, content, status=200):
        self.send(json.dumps(content).encode(), {"Content-Type": "application/json"}, status)

    def send(self, data, headers=(), status=200):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def is_lfs(name):
    return name.endswith(".safetensors")


class Hub(ThreadingHTTPServer):
    """
    Has `repos` (name → path → content), `created` (what was asked for), `commits` (the paths of each), `states` (path →
    content of the repository after each), and, while `refuses_commits` is set, no room left.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.objects, self.created, self.commits, self.states = {}, {}, [], [], []
        self.refuses_commits = False

    @property
    def sha(self):
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


@contextmanager
def serve():
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


def environment(url, home, **variables):
    """The environment of a process that takes `url` for the Hub and imports the tests' modules."""
    tests = Path(__file__).parent
    paths = [str(tests.parents[1]), str(tests), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **variables,
    }


def use(hub, monkeypatch):
    """Makes `hub` the Hub of this process."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template[template.index("/{repo_id}") :])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # kept from the first call on
    monkeypatch.setenv("HF_TOKEN", TOKEN)
