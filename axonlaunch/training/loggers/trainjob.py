"""Logs progress and metrics to the status of the TrainJob that runs this process.

Kubeflow Trainer sets the variables if its feature ``TrainJobStatus`` is on (alpha since 2.2):
https://github.com/kubeflow/trainer/blob/v2.3.0/docs/user-guides/trainjob-progress.md
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axonlaunch.training.loggers.logger import Logger, Number, RunInfo

URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_EVERY_S = 5.0
"""Shortest time between two updates in seconds, as Trainer requests."""
_TIMEOUT_S = 10.0
_LONGEST, _MOST = 64, 256
"""Limits of the API: characters of a name or a value, and number of metrics."""
_OK = 200


class TrainJobLogger(Logger):
    """Logger to the status of a TrainJob: percentage, remaining seconds, and the latest metrics."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Read the variables that Trainer has set.

        Raises:
            ValueError: One is missing or the server is not reached by HTTPS.
        """
        missing = [name for name in (URL, _CERTIFICATE, _TOKEN) if not variables.get(name)]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set")
        self._url = urlsplit(variables[URL])
        if self._url.scheme != "https" or self._url.hostname is None:
            raise ValueError(f"{URL} is not an https URL")
        self._context = ssl.create_default_context(cafile=variables[_CERTIFICATE])
        self._token = Path(variables[_TOKEN])
        self._metrics: dict[str, Number] = {}
        self._step = self._steps = 0
        self._sent_at = -_EVERY_S
        self._is_sent = True

    def start(self, run: RunInfo) -> None:
        """Note the number of steps of the run."""
        self._steps = int(run.config["train"]["steps"])

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Send the latest metrics, unless others have just been sent."""
        self._metrics |= metrics
        self._step, self._is_sent = step, False
        if time.monotonic() - self._sent_at >= _EVERY_S:
            self._send()

    def close(self, *, failed: bool) -> None:
        """Send the last metrics."""
        del failed
        if not self._is_sent:
            self._send()

    def status(self) -> dict[str, Any]:
        """Return the current ``trainerStatus`` of the API."""
        left = max(0, self._steps - self._step)
        status: dict[str, Any] = {
            "progressPercentage": min(100, 100 * self._step // max(1, self._steps)),
            "metrics": [
                {"name": name, "value": str(value)}
                for name, value in self._metrics.items()
                if len(name) <= _LONGEST
            ][:_MOST],
            "lastUpdatedTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        if "step_s" in self._metrics:
            status["estimatedRemainingSeconds"] = round(left * self._metrics["step_s"])
        return status

    def _send(self) -> None:
        """Send the status.

        Raises:
            OSError: The server is not reachable.
            ValueError: The server refuses the status.
        """
        self._sent_at = time.monotonic()
        # Redirects are not followed, and the token, which changes, goes to no other server.
        server = http.client.HTTPSConnection(
            str(self._url.hostname), self._url.port, context=self._context, timeout=_TIMEOUT_S
        )
        headers = {
            "Authorization": f"Bearer {self._token.read_text().strip()}",
            "Content-Type": "application/json",
        }
        try:
            body = json.dumps({"trainerStatus": self.status()})
            server.request("POST", self._url.path, body, headers)
            answer = server.getresponse()
            reason = answer.read(1 << 12).decode(errors="replace").strip()
        finally:
            server.close()
        if answer.status != _OK:
            raise ValueError(f"HTTP status {answer.status}: {reason}")
        self._is_sent = True
