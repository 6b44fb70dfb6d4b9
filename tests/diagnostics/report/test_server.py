"""The served page can be read by anyone with its address; nothing else is served."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.run_folders import run_folder

from axonlaunch.diagnostics.report import server as server_module
from axonlaunch.diagnostics.report.live_page_data import LivePageData
from axonlaunch.diagnostics.report.server import RunServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "demo", steps=3, status=None)


@pytest.fixture
def server(folder: Path) -> Iterator[RunServer]:
    server = RunServer(LivePageData([folder]), title="demo")
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join()


@contextmanager
def answer(
    server: RunServer, path: str, *, host: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
    with closing(connection):
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host or address.netloc)
        connection.endheaders()
        with connection.getresponse() as response:
            yield response


def test_the_page_is_at_its_address(server: RunServer) -> None:
    with answer(server, urlsplit(server.url).path) as got:
        assert got.status == 200
        assert b'"live":true' in got.read()
        assert got.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/{token}", "/{token}/x", "/{token}/../config.yaml"]
)
def test_other_paths_and_tokens_get_nothing(path: str, server: RunServer) -> None:
    token = urlsplit(server.url).path.strip("/")
    with answer(server, path.replace("{token}", token)) as got:
        assert (got.status, got.read()) == (404, b"")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "evil.example:80"])
def test_a_page_that_reaches_it_by_another_name_gets_nothing(host: str, server: RunServer) -> None:
    with answer(server, urlsplit(server.url).path, host=host) as got:
        assert got.status == 404


def test_report_server_streams_new_metrics(server: RunServer, folder: Path) -> None:
    with answer(server, urlsplit(server.url).path + "events") as got:
        first = json.loads(got.readline().removeprefix(b"data: "))
        got.readline()
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": 4, "loss": 7.5}) + "\n")
        second = json.loads(got.readline().removeprefix(b"data: "))
    losses = [event["runs"][0]["series"]["loss"][1][-1] for event in (first, second)]
    assert losses[1] == 7.5 != losses[0]


def test_tokens_are_long_and_of_each_server_its_own(folder: Path) -> None:
    servers = [RunServer(LivePageData([folder]), title="demo") for _ in range(2)]
    tokens = {urlsplit(server.url).path.strip("/") for server in servers}
    for server in servers:
        server._server.server_close()
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32


def silent_connections(server: RunServer, number: int, stack: ExitStack) -> list[socket.socket]:
    address = ("127.0.0.1", urlsplit(server.url).port)
    return [stack.enter_context(socket.create_connection(address)) for _ in range(number)]


def test_silent_connections_do_not_keep_the_owner_out(server: RunServer) -> None:
    limit = server_module._MAX_UNPROVEN
    with ExitStack() as stack:
        silent = silent_connections(server, 3 * limit, stack)
        with answer(server, urlsplit(server.url).path) as got:
            assert got.status == 200
        for connection in silent[:limit]:  # the oldest are closed
            connection.settimeout(20)
            assert connection.recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_connection_that_sends_no_request_is_closed_in_time_however_slowly_it_writes(
    sent: bytes, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        [connection] = silent_connections(server, 1, stack)
        monkeypatch.setattr(server_module, "_REQUEST_S", 0.5)
        connection.sendall(sent)
        connection.settimeout(0.1)
        for _ in range(200):
            with suppress(TimeoutError):
                if connection.recv(1) == b"":
                    return
            if sent:
                with suppress(OSError):
                    connection.send(b"x")
    raise AssertionError("it is still open")


def test_open_pages_are_not_closed_for_silent_connections(server: RunServer, folder: Path) -> None:
    with ExitStack() as stack:
        got = stack.enter_context(answer(server, urlsplit(server.url).path + "events"))
        assert got.readline().startswith(b"data: ")
        got.readline()
        silent_connections(server, 2 * server_module._MAX_UNPROVEN, stack)
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": 4, "loss": 7.5}) + "\n")
        assert b"7.5" in got.readline()


def test_a_page_stays_as_it_was_when_its_run_can_not_be_read_any_more(folder: Path) -> None:
    newest = LivePageData([folder])
    old_page = newest()
    newest._resting_until = 0.0
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text("")
    assert newest() == old_page
