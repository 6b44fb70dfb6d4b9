"""A secret from the environment reaches its logger, but no file and no page of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Served

SECRET = "hunter2-and-more"
LOGGER = """
class Sends:
    def __init__(self, key):
        self.has_key = key[::-1] == "erom-dna-2retnuh"

    def start(self, run):
        self.file = run.run_dir / "sent.txt"
        self.file.write_text(f"{self.has_key} {run.config['loggers'][0]['arguments']}")

    def log(self, metrics, *, step):
        pass
"""


def test_a_secret_of_the_environment_reaches_its_logger_and_no_file_or_page(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    (served.folder / "sends.py").write_text(LOGGER)
    logger = "loggers=[{target: 'sends:Sends', arguments: {key: '${oc.env:API_KEY}'}}]"
    saving = ["checkpoint.every=3", f"checkpoint.path={served.folder}/saved"]
    train = ["launch.nproc=2", "strategy=ddp", "name=run", "train.steps=3", *saving, logger]
    printed = served.train(*train)
    shown = [served("config", logger), served("config", "--json", logger)]
    shown += [served("report", "runs/run"), served("config", "--explain", logger)]
    sent = (served.folder / "runs/run/sent.txt").read_text()
    assert sent == "True {'key': '${oc.env:API_KEY}'}"
    files = [path for path in served.folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "origins.json", "report.html"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    for process in (printed, *shown):
        assert SECRET not in process.stdout + process.stderr
    frozen = [path for path in files if path.name == "config.yaml"]
    assert len(frozen) == 2  # in the run's folder and in its checkpoints' folder
    assert all("${oc.env:API_KEY}" in path.read_text() for path in frozen)
    assert not Path(served.folder, "runs/run-2").exists()
    resumed = served.train(*train[:3], "train.steps=4", *saving, logger)
    assert "resuming with changed settings" not in resumed.stdout + resumed.stderr
