"""Serves the page of runs on loopback, and what is new while they train.

Whoever has the address with its random token can read the page, and nothing else: no path is taken
from a request, nothing is written, and other host names than this node's own loopback are refused,
so that no page of a browser reaches it by a name that it resolves itself (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from axonlaunch.diagnostics.report.page import page_of

_LOOPBACK = "127.0.0.1"
_INTERVAL_S = 1.0
_HEARTBEAT_S = 15.0


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
    daemon_threads = True
    page: _Page


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the page, or with what is new; with nothing to whoever lacks the token."""
        page = self.server.page
        hosts = [f"{name}:{self.server.server_port}" for name in (_LOOPBACK, "localhost")]
        _, token, *rest = [*self.path.split("/"), ""]
        if self.headers.get("Host") not in hosts or not hmac.compare_digest(
            token.encode(), page.token.encode()
        ):
            self._refuse()
        elif rest == ["", ""]:
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
        except (BrokenPipeError, ConnectionError):
            return  # the browser has left
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
