"""A gateway to the API server for tests: suspends Jobs, and keeps what that server is too old for.

Commands send their requests here, the controllers and the node send theirs to the server. A request
that suspends a Job sets its parallelism to 0 and marks it. So its controller deletes the pods, and
creates new ones when the Job resumes, as that of Kubernetes since 1.21 does. In answers, a marked
Job is suspended, by the client that set its parallelism. The failure policy of a Job, which the
server drops, becomes an annotation that the node reads. Requests for custom resources go to the
server that has them, if there is one. All other requests pass unchanged. While the server does not
answer, connections are closed without an answer.
"""

import argparse
import http.client
import json
import re
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MARK, POLICY = "kube-up/suspended", "kube-up/failure-policy"
JOBS = re.compile(r"/apis/batch/v1/(?:namespaces/[^/]+/)?jobs(?:/[^/?]+)?(?:\?|$)")
CUSTOM = re.compile(
    r"/apis/(?:apiextensions\.k8s\.io|jobset\.x-k8s\.io|trainer\.kubeflow\.org)(?:/|$)"
)
CONDITION = {"type": "Suspended", "status": "True", "reason": "JobSuspended"}
HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"}
"""Headers of one connection."""


def suspend(change, completions: int):
    """Return a Job, or a patch of one, without ``suspend``, which the server does not know."""
    spec = change.get("spec") or {}
    if "suspend" not in spec:
        return change
    is_suspended = spec.pop("suspend")
    metadata = change.setdefault("metadata", {})
    annotations = metadata.setdefault("annotations", {})
    annotations[MARK] = "true" if is_suspended else None
    spec["parallelism"] = 0 if is_suspended else completions
    return change


def keep_policy(job):
    """Return a new Job with its failure policy as an annotation; a patch unchanged."""
    policy = (job.get("spec") or {}).get("podFailurePolicy")
    if policy is not None:
        job["metadata"].setdefault("annotations", {})[POLICY] = json.dumps(policy)
    return job


def show(job):
    """Return a Job as a server that knows ``suspend`` does."""
    if MARK in (job["metadata"].get("annotations") or {}):
        job["spec"] |= {"suspend": True, "parallelism": job["spec"]["completions"]}
        job["status"].setdefault("conditions", []).append(CONDITION)
        for entry in job["metadata"].get("managedFields", []):
            fields = entry["fieldsV1"].get("f:spec", {})
            if "f:parallelism" in fields:
                fields["f:suspend"] = fields.pop("f:parallelism")
    return job


class Gateway(BaseHTTPRequestHandler):
    """Passes on requests of a connection.

    Attributes:
        port: Port of the server.
        custom_port: Port of the server of custom resources; 0 without one.
    """

    protocol_version = "HTTP/1.1"
    port = custom_port = 0

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else None
        is_job = JOBS.match(self.path) is not None
        try:
            if is_job and body and self.command != "DELETE":
                body = self.translated(body)
            status, headers, content = self.ask(self.command, self.path, body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        if is_job and status < 300 and self.command != "DELETE":
            answer = json.loads(content)
            for job in answer["items"] or [] if "items" in answer else [answer]:
                show(job)
            content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def translated(self, body: bytes) -> bytes:
        change = keep_policy(json.loads(body))
        completions = change.get("spec", {}).get("completions")
        if completions is None:
            _, _, content = self.ask("GET", self.path, None)
            completions = json.loads(content).get("spec", {}).get("completions", 1)
        return json.dumps(suspend(change, completions)).encode()

    def ask(self, method: str, path: str, body: bytes | None):
        context = ssl._create_unverified_context()
        is_custom = self.custom_port and CUSTOM.match(path)
        port = self.custom_port if is_custom else self.port
        server = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
        headers["Accept"] = "application/json" if JOBS.match(path) else headers.get("Accept", "*/*")
        try:
            server.request(method, path, body, headers)
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def log_message(self, *arguments) -> None:
        del arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server-port", type=int, required=True)
    parser.add_argument("--custom-port", type=int, default=0)
    arguments = parser.parse_args()
    Gateway.port, Gateway.custom_port = arguments.server_port, arguments.custom_port
    certs = arguments.folder / "certs"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "apiserver.crt", certs / "apiserver.key")
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Gateway)
    server.daemon_threads = True
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    server.serve_forever()


main()
