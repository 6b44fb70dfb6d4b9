"""Progress in the status of a TrainJob, sent to a server on this node that has a certificate."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.launchers import needs
from support.logged_runs import notes, train

from axonlaunch.training.loggers import RunInfo, trainjob
from axonlaunch.training.loggers.trainjob import TrainJobLogger


class StatusServer(BaseHTTPRequestHandler):
    """Keeps what is posted.

    Attributes:
        seen: Path, token and status of each request.
        status: HTTP status of its answers.
    """

    seen: list[tuple[str, str, Any]]
    status: int

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"message": "Forbidden"}')

    def log_message(self, *arguments: Any) -> None:
        del arguments


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StatusServer]]:
    """Return a server that the variables of Kubeflow Trainer name."""
    needs("openssl", root=False)
    key, certificate, token = (tmp_path / name for name in ("key", "certificate", "token"))
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    request += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=trainer"]
    request += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(request, check=True, capture_output=True)
    token.write_text("first\n")
    handler: type[StatusServer] = type("Handler", (StatusServer,), {"seen": [], "status": 200})
    with HTTPServer(("127.0.0.1", 0), handler) as listening:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{listening.server_port}/namespaces/research/trainjobs/big/status"
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        yield handler
        listening.shutdown()
        thread.join()


def logger_of(folder: Path, *, steps: int = 200) -> TrainJobLogger:
    """Return the logger of a run that has started."""
    logger = TrainJobLogger(os.environ)
    logger.start(RunInfo(name="big", run_dir=folder, config={"train": {"steps": steps}}))
    return logger


def test_status_has_progress_remaining_seconds_and_latest_metrics(
    server: type[StatusServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob, "_EVERY_S", 0.0)
    logger = logger_of(tmp_path)
    logger.log({"loss": 2.5, "step_s": 0.5, "eval_loss/" + "x" * 60: 1.0}, step=50)
    (tmp_path / "token").write_text("second\n")
    logger.log({"eval_loss": 2.25}, step=50)
    (path, first, status), (_, second, later) = server.seen
    assert path == "/namespaces/research/trainjobs/big/status"
    assert (first, second) == ("Bearer first", "Bearer second")
    assert status.pop("lastUpdatedTime").endswith("Z")
    metrics = [{"name": "loss", "value": "2.5"}, {"name": "step_s", "value": "0.5"}]
    assert status == {
        "progressPercentage": 25,
        "estimatedRemainingSeconds": 75,
        "metrics": metrics,
    }
    assert later["metrics"] == [*metrics, {"name": "eval_loss", "value": "2.25"}]


def test_status_is_sent_every_5_seconds_and_at_the_end(
    server: type[StatusServer], tmp_path: Path
) -> None:
    logger = logger_of(tmp_path, steps=3)
    for step in (1, 2, 3):
        logger.log({"loss": 1.0}, step=step)
    logger.close(failed=False)
    assert [status["progressPercentage"] for *_, status in server.seen] == [33, 100]


def test_refused_status_is_reported_and_training_continues(
    server: type[StatusServer], tmp_path: Path
) -> None:
    server.status = 403
    events = train(tmp_path / "run", "train.steps=2", "train.eval_every=0", "train.eval_batches=0")
    assert server.seen[0][2]["progressPercentage"] == 50
    [note] = notes(events)
    assert note.startswith("loggers: TrainJob status failed at step 1, and training continues: ")
    assert 'HTTP status 403: {"message": "Forbidden"}' in note


def test_server_without_https_is_refused() -> None:
    names = ("URL", "CA_CERT", "TOKEN")
    variables = {f"KUBEFLOW_TRAINER_SERVER_{name}": "http://trainer" for name in names}
    with pytest.raises(ValueError, match="KUBEFLOW_TRAINER_SERVER_URL is not an https URL"):
        TrainJobLogger(variables)
    del variables["KUBEFLOW_TRAINER_SERVER_TOKEN"]
    with pytest.raises(ValueError, match="KUBEFLOW_TRAINER_SERVER_TOKEN not set"):
        TrainJobLogger(variables)
