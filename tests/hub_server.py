"""Stand-in for the Hugging Face Hub on loopback, with the endpoints that pushing and pulling a model repository need.

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


def _oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        hub = self.server
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "whoami-v2"]:
            good = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return (
                self.answer(200, {"name": "user", "type": "user"}) if good else self.answer(401, {"error": "bad token"})
            )
        if hub.down:
            return self.answer(503, {"error": "maintenance"})
        repo_id = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        if repo_id not in hub.repos:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        files = hub.repos[repo_id]
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            entries = [{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()]
            return self.answer(200, entries)
        if parts[:2] == ["api", "models"]:
            siblings = [{"rfilename": name} for name in files]
            return self.answer(200, {"id": repo_id, "sha": sha, "siblings": siblings, "private": False, "tags": []})
        if parts[2] == "resolve":
            content = files["/".join(parts[4:])]
            return self.answer(200, content, ETag=f'"{_oid(content)}"', X_Repo_Commit=sha)
        return self.answer(404)

    do_HEAD = do_GET

    def do_POST(self):
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            wanted = json.loads(body)
            repo_id = f"{wanted['organization']}/{wanted['name']}"
            if wanted["organization"] != "user":
                return self.answer(403, {"error": "not your namespace"})
            hub.created.append(wanted)
            status = 409 if repo_id in hub.repos else 200
            hub.repos.setdefault(repo_id, {".gitattributes": b"*.bin filter=lfs\n"})
            return self.answer(status, {"url": f"{hub.url}/{repo_id}"})
        if parts == ["api", "validate-yaml"]:
            return self.answer(200, {"warnings": [], "errors": []})
        repo_id = "/".join(parts[2:4])
        if parts[4] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            return self.answer(200, {"files": modes})
        for line in body.splitlines():  # commit
            item = json.loads(line)
            if item["key"] == "file":
                hub.repos[repo_id][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "deletedFile":
                del hub.repos[repo_id][item["value"]["path"]]
            else:
                hub.commits.append(item["value"]["summary"])
        return self.answer(200, {"commitUrl": f"{hub.url}/{repo_id}/commit/{'0' * 40}", "commitOid": "0" * 40})


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # the library opens many connections at once


@contextmanager
def serve():
    """Runs a Hub: `url`, `repos` (name -> file -> bytes), `created`, `commits`, and `down` to make it answer 503."""
    server = Server(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repos, server.created, server.commits, server.down = {}, [], [], False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
