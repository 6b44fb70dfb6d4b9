"""Serves the page of runs on loopback, with updates while they train.

Requests need the random token of the address. They can only read the page: no file path is taken
from a request, and nothing is written. Requests with host names other than this node's loopback are
rejected, which prevents DNS rebinding. Connections are limited in number and time, so that other
users of the node can't block the owner.
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
"""Seconds in which a connection must send a request with the token."""
_MAX_UNPROVEN = 64
"""Maximum number of connections without the token; another one closes the oldest."""
_MAX_PROVEN = 32
"""Maximum number of connections with the token, such as open pages; the oldest is closed."""


class RunServer:
    """Serves one page until it is closed.

    Attributes:
        url: Address with the token.
    """

    def __init__(self, data: Callable[[], dict[str, Any]], *, title: str, port: int = 0) -> None:
        """Listen on a port. Call ``serve`` to answer requests.

        Args:
            data: Function that returns the current ``page_data``; called from several threads.
            title: Title of the window.
            port: Port on loopback; 0 uses a free port.

        Raises:
            OSError: The port is in use.
        """
        self._token = secrets.token_urlsafe(24)
        self._over = threading.Event()
        self._server = _Server((_LOOPBACK, port), _Handler)
        self._server.page = _Page(data, title, self._token, self._over)
        self.url = f"http://{_LOOPBACK}:{self._server.server_port}/{self._token}/"

    def serve(self) -> None:
        """Answer requests until another thread calls ``close`` or Ctrl-C is pressed."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """End all connections and stop listening."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


class _Page:
    """The page and its token."""

    def __init__(
        self, data: Callable[[], dict[str, Any]], title: str, token: str, over: threading.Event
    ) -> None:
        self.data = data
        self.title = title
        self.token = token
        self.over = over


class _Server(ThreadingHTTPServer):
    """Limits connections, so that idle ones can't block others."""

    daemon_threads = True
    request_queue_size = 128
    page: _Page

    def __init__(self, *args: Any) -> None:
        self._counting = threading.Lock()
        self._unproven: dict[Any, float] = {}  # in order of arrival
        self._proven: dict[Any, None] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread."""
        with self._counting:
            self._unproven[request] = time.monotonic()
            _end_oldest(self._unproven, _MAX_UNPROVEN)
        super().process_request(request, client_address)

    def proven(self, request: Any) -> None:
        """Record that a connection has sent the token."""
        with self._counting:
            self._unproven.pop(request, None)
            self._proven[request] = None
            _end_oldest(self._proven, _MAX_PROVEN)

    def service_actions(self) -> None:
        """End connections that have not sent the token in time; called five times a second."""
        with self._counting:
            since = time.monotonic() - _REQUEST_S
            for request in [late for late, began in self._unproven.items() if began < since]:
                _end(request)
                del self._unproven[request]

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its thread has finished."""
        with self._counting:
            self._unproven.pop(request, None)
            self._proven.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a broken connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _end_oldest(connections: dict[Any, Any], limit: int) -> None:
    while len(connections) > limit:
        oldest = next(iter(connections))
        _end(oldest)
        del connections[oldest]


def _end(connection: socket.socket) -> None:
    """Wake the thread that uses a connection, which then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answer with the page or its updates; requests without the token get status 404."""
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
        """Send the page's data after each change; comments keep the connection open."""
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
            return  # the browser has closed the connection or does not read
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
