"""Stand-in for the Hugging Face Hub on loopback, with the endpoints that pushing and pulling a model repository
need.

By the source of huggingface_hub 1 and 2, these are: whoami-v2, repos/create, models/REPO (revision, tree),
validate-yaml, preupload and commit (newline-delimited JSON, files in base64), resolve/REVISION/FILE.
"""

import base64
import hashlib
import json
import threading
import urllib.parse
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test_token"
SHA = 40 * "0"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        good = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        parts = path.removeprefix("/api/models").strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            return self.answer({"name": "user"}) if good else self.answer({"error": "bad token"}, 401)
        repo_id = "/".join(parts[:2])
        if repo_id not in hub.repos or (repo_id in hub.private and not good):
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        files = hub.repos[repo_id]
        if parts[2:3] == ["resolve"]:
            content = files["/".join(parts[4:])]
            return self.answer(content, ETag=hashlib.sha1(content).hexdigest(), X_Repo_Commit=SHA)
        if parts[2:3] == ["tree"]:
            entry = {"type": "file", "oid": SHA}
            return self.answer([entry | {"path": name, "size": len(content)} for name, content in files.items()])
        about = {"id": repo_id, "sha": SHA, "private": repo_id in hub.private, "tags": []}
        return self.answer(about | {"siblings": [{"rfilename": name} for name in files]})

    do_HEAD = do_GET

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts == ["api", "validate-yaml"]:
            return self.answer({"warnings": [], "errors": []})
        if parts == ["api", "repos", "create"]:
            wanted = json.loads(body)
            repo_id = f"{wanted['organization']}/{wanted['name']}"
            if wanted["organization"] != "user":
                return self.answer({"error": "not your namespace"}, 403)
            if repo_id in hub.repos:  # the visibility stays as it is
                return self.answer({"url": f"{hub.url}/{repo_id}"}, 409)
            hub.repos[repo_id] = {".gitattributes": b"*.bin filter=lfs\n"}
            # huggingface_hub 2 and 1.
            if "private" in (wanted.get("visibility"), wanted.get("private") and "private"):
                hub.private.add(repo_id)
            return self.answer({"url": f"{hub.url}/{repo_id}"})
        if parts[4] == "preupload":
            mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self.answer({"files": [mode | {"path": file["path"]} for file in json.loads(body)["files"]]})
        repo_id = "/".join(parts[2:4])
        files = hub.repos[repo_id]
        for item in map(json.loads, body.splitlines()):  # commit
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
            else:
                hub.commits.append(value["summary"])
        return self.answer({"commitUrl": f"{hub.url}/{repo_id}/commit/{SHA}", "commitOid": SHA})


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # the library opens many connections at once


@contextmanager
def serve():
    """Runs a Hub: `url`, `repos` (name -> file -> bytes), `private` (names of those that need the token),
    `commits`."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.repos, server.private, server.commits = {}, set(), []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
