"""The served page is read by whoever has its address, and gives nothing else to anybody."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from run_folders import run_folder

from axonlaunch.diagnostics.report.newest import NewestData
from axonlaunch.diagnostics.report.server import RunServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "demo", steps=3, status=None)


@pytest.fixture
def server(folder: Path) -> Iterator[RunServer]:
    server = RunServer(NewestData([folder]), title="demo")
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


def test_what_a_run_logs_is_sent_to_who_follows_it(server: RunServer, folder: Path) -> None:
    with answer(server, urlsplit(server.url).path + "events") as got:
        first = json.loads(got.readline().removeprefix(b"data: "))
        got.readline()
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": 4, "loss": 7.5}) + "\n")
        second = json.loads(got.readline().removeprefix(b"data: "))
    losses = [event["runs"][0]["series"]["loss"][1][-1] for event in (first, second)]
    assert losses[1] == 7.5 != losses[0]


def test_tokens_are_long_and_of_each_server_its_own(folder: Path) -> None:
    servers = [RunServer(NewestData([folder]), title="demo") for _ in range(2)]
    tokens = {urlsplit(server.url).path.strip("/") for server in servers}
    for server in servers:
        server._server.server_close()
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32
