"""Stand-in for the Hugging Face Hub on loopback, with the endpoints that pushing and pulling a model repository need.

By the source of huggingface_hub 1 and 2, these are: whoami-v2, repos/create, models/REPO (revision, tree),
validate-yaml, preupload and commit (newline-delimited JSON, files in base64), resolve/REVISION/FILE. Files of
`LFS_BYTES` or more go through Git LFS, as on the Hub: a batch request, an upload of its own, and later a redirect.
"""

import base64
import hashlib
import json
import threading
import urllib.parse
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test_token"
LFS_BYTES = 1 << 20


@cache
def _sha256(content):
    return hashlib.sha256(content).hexdigest()


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
        good = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if parts[:2] == ["api", "whoami-v2"]:
            return (
                self.answer(200, {"name": "user", "type": "user"}) if good else self.answer(401, {"error": "bad token"})
            )
        if hub.down:
            return self.answer(503, {"error": "maintenance"})
        if parts[0] == "lfs":
            return self.answer(200, hub.objects[parts[1]])
        repo_id = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        if repo_id not in hub.repos or (repo_id in hub.private and not good):
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        files = hub.repos[repo_id]
        sha = hashlib.sha1(
            repr(sorted((name, _sha256(content)) for name, content in files.items())).encode()
        ).hexdigest()
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            return self.answer(200, [self.entry(name, content) for name, content in files.items()])
        if parts[:2] == ["api", "models"]:
            siblings = [{"rfilename": name} for name in files]
            private = repo_id in hub.private
            return self.answer(200, {"id": repo_id, "sha": sha, "siblings": siblings, "private": private, "tags": []})
        if parts[2] == "resolve":
            content = files["/".join(parts[4:])]
            if (oid := _sha256(content)) in hub.objects:
                elsewhere = hub.url.replace("127.0.0.1", "localhost")  # the Hub's large files are on another host
                where = {
                    "Location": f"{elsewhere}/lfs/{oid}",
                    "X_Linked_Size": len(content),
                    "X_Linked_Etag": f'"{oid}"',
                }
                return self.answer(302, X_Repo_Commit=sha, **where)
            return self.answer(200, content, ETag=f'"{_oid(content)}"', X_Repo_Commit=sha)
        return self.answer(404)

    do_HEAD = do_GET

    def entry(self, name, content):
        """A file in a listing."""
        entry = {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
        if (oid := _sha256(content)) in self.server.objects:
            entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
        return entry

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_PUT(self):
        content, oid = self.body(), self.path.rpartition("/")[2]
        if _sha256(content) != oid:
            return self.answer(400, {"error": "another content"})
        self.server.objects[oid] = content
        return self.answer(200)

    def do_POST(self):
        hub = self.server
        body = self.body()
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[-1] == "batch":
            upload = lambda item: {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}  # noqa: E731
            objects = [item | {"actions": upload(item)} for item in json.loads(body)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if parts == ["api", "repos", "create"]:
            wanted = json.loads(body)
            repo_id = f"{wanted['organization']}/{wanted['name']}"
            if wanted["organization"] != "user":
                return self.answer(403, {"error": "not your namespace"})
            if repo_id in hub.repos:  # the visibility stays as it is
                return self.answer(409, {"url": f"{hub.url}/{repo_id}"})
            hub.repos[repo_id] = {".gitattributes": b"*.bin filter=lfs\n"}
            # Visibility in huggingface_hub 2, a flag in 1; without either, the default of the organization.
            default = {"visibility": "private" if hub.private_by_default else "public"}
            if wanted.get("private", (default | wanted)["visibility"] == "private"):
                hub.private.add(repo_id)
            return self.answer(200, {"url": f"{hub.url}/{repo_id}"})
        if parts == ["api", "validate-yaml"]:
            return self.answer(200, {"warnings": [], "errors": []})
        repo_id = "/".join(parts[2:4])
        if parts[4] == "preupload":
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["size"] >= LFS_BYTES else "regular",
                 "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self.answer(200, {"files": modes})
        for line in body.splitlines():  # commit
            item = json.loads(line)
            if item["key"] == "file":
                hub.repos[repo_id][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                hub.repos[repo_id][item["value"]["path"]] = hub.objects[item["value"]["oid"]]
            elif item["key"] == "deletedFile":
                del hub.repos[repo_id][item["value"]["path"]]
            else:
                hub.commits.append(item["value"]["summary"])
        return self.answer(200, {"commitUrl": f"{hub.url}/{repo_id}/commit/{'0' * 40}", "commitOid": "0" * 40})


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # the library opens many connections at once


@contextmanager
def serve():
    """Runs a Hub: `url`, `repos` (name -> file -> bytes), `commits`, and `down` to make it answer 503.

    `private` are the names of the private repositories, which need the token; `private_by_default` makes new ones
    private. `objects` are the files that came by Git LFS: SHA-256 -> bytes.
    """
    server = Server(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repos, server.objects, server.commits, server.down = {}, {}, [], False
    server.private, server.private_by_default = set(), False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
