"""Serves the page of runs on loopback, and what is new while they train.

Whoever has the address with its random token can read the page, and nothing else: no path is taken
from a request, nothing is written, and other host names than this node's own loopback are refused,
so that no page of a browser reaches it by a name that it resolves itself (DNS rebinding).
Connections are limited in number and time, so that other users of the node can't keep the owner
out.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from axonlaunch.diagnostics.report.page import page_of

_LOOPBACK = "127.0.0.1"
_INTERVAL_S = 1.0
_HEARTBEAT_S = 15.0
_REQUEST_S = 10.0
"""Seconds in which a connection has to send a request with the token."""
_MAX_UNPROVEN = 64
"""Connections that have not sent the token; for a further one the oldest of them is closed."""
_MAX_PROVEN = 32
"""The same for connections that have sent it, such as open pages."""


class RunServer:
    """Serves one page until it is closed.

    Attributes:
        url: Its address, with the token.
    """

    def __init__(self, data: Callable[[], dict[str, Any]], *, title: str, port: int = 0) -> None:
        """Listen; ``serve`` answers.

        Args:
            data: Returns what the page shows now, as ``page_data`` does; called from threads.
            title: Of the window.
            port: On loopback; 0: a free one.

        Raises:
            OSError: The port is taken.
        """
        self._token = secrets.token_urlsafe(24)
        self._over = threading.Event()
        self._server = _Server((_LOOPBACK, port), _Handler)
        self._server.page = _Page(data, title, self._token, self._over)
        self.url = f"http://{_LOOPBACK}:{self._server.server_port}/{self._token}/"

    def serve(self) -> None:
        """Answer until another thread closes it, or Ctrl-C is pressed."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """End every connection, and listen no more."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


class _Page:
    """What is served."""

    def __init__(
        self, data: Callable[[], dict[str, Any]], title: str, token: str, over: threading.Event
    ) -> None:
        self.data = data
        self.title = title
        self.token = token
        self.over = over


class _Server(ThreadingHTTPServer):
    """Limits connections, so that silent ones can't keep others out."""

    daemon_threads = True
    request_queue_size = 128
    page: _Page

    def __init__(self, *args: Any) -> None:
        self._counting = threading.Lock()
        self._unproven: dict[Any, float] = {}  # in the order in which they came
        self._proven: dict[Any, None] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread."""
        with self._counting:
            self._unproven[request] = time.monotonic()
            _end_oldest(self._unproven, _MAX_UNPROVEN)
        super().process_request(request, client_address)

    def proven(self, request: Any) -> None:
        """Take note that a connection has sent the token."""
        with self._counting:
            self._unproven.pop(request, None)
            self._proven[request] = None
            _end_oldest(self._proven, _MAX_PROVEN)

    def service_actions(self) -> None:
        """End connections that have not sent the token in time; called five times a second."""
        with self._counting:
            since = time.monotonic() - _REQUEST_S
            for request in [known for known, began in self._unproven.items() if began < since]:
                _end(request)
                del self._unproven[request]

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread is done."""
        with self._counting:
            self._unproven.pop(request, None)
            self._proven.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a connection that broke."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _end_oldest(connections: dict[Any, Any], most: int) -> None:
    while len(connections) > most:
        oldest = next(iter(connections))
        _end(oldest)
        del connections[oldest]


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads from a connection or writes to it, which then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answer with the page, or with what is new; with nothing to whoever lacks the token."""
        page = self.server.page
        hosts = [f"{name}:{self.server.server_port}" for name in (_LOOPBACK, "localhost")]
        _, token, *rest = [*self.path.split("/"), ""]
        if self.headers.get("Host") not in hosts or not hmac.compare_digest(
            token.encode(), page.token.encode()
        ):
            self.close_connection = True
            self._refuse()
            return
        self.server.proven(self.connection)
        if rest == ["", ""]:
            text = page_of(page.data(), title=page.title, is_live=True)
            self._begin(HTTPStatus.OK, "text/html; charset=utf-8", len(text.encode()))
            self.wfile.write(text.encode())
        elif rest == ["events", ""]:
            self._follow(page)
        else:
            self._refuse()

    def _follow(self, page: _Page) -> None:
        """Send what the page shows whenever it is another; a comment now and then keeps it open."""
        self._begin(HTTPStatus.OK, "text/event-stream", None)
        sent, quiet = "", 0.0
        try:
            while not page.over.is_set():
                text = json.dumps({**page.data(), "live": True}, allow_nan=False)
                if text != sent:
                    self.wfile.write(f"data: {text}\n\n".encode())
                    sent, quiet = text, 0.0
                elif quiet >= _HEARTBEAT_S:
                    self.wfile.write(b": nothing is new\n\n")
                    quiet = 0.0
                page.over.wait(_INTERVAL_S)
                quiet += _INTERVAL_S
        except OSError:
            return  # the browser has left, or does not read
        finally:
            self.close_connection = True

    def _refuse(self) -> None:
        self._begin(HTTPStatus.NOT_FOUND, "text/plain", 0)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing: the address holds the token."""
