"""Data sets of the Hub, from a local server: downloads, the cache, commits and refusals."""

from __future__ import annotations

import errno
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import Hub, hub_server

import axonlaunch.system.hub
from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import DocumentsConfig, HeldOutConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.files.rows import RowReader
from axonlaunch.data.hub import repository
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.selection.pinning import commits_in, fetch_data, pinned_data

huggingface_hub = pytest.importorskip("huggingface_hub")


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


TRAIN, TEST = [f"train {n}" for n in range(200)], [f"test {n}" for n in range(50)]
FILES = {
    "README.md": "---\nlicense: mit\n---\n",
    "train-00000-of-00002.jsonl": lines(TRAIN[:100]),
    "train-00001-of-00002.jsonl": lines(TRAIN[100:]),
    "test.jsonl": lines(TEST),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return the server with one data set; this process has an empty cache."""
    server.repos.clear()
    server.faults.clear()
    server.asked.clear()
    server.ranges.clear()
    server.use(tmp_path, monkeypatch)
    server.dataset("team/rows", FILES)
    monkeypatch.setattr(axonlaunch.system.hub, "_WAIT_S", 0.0)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    return server


def texts(*files: str, **keys: Any) -> list[str]:
    sources = FileSelection(files, **keys).sources()
    return [row["text"] for source in sources for _, row in RowReader(source)]  # type: ignore[index, call-overload]


def refusal(*files: str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        FileSelection(files, **keys).sources()
    [problem] = error.value.problems
    return str(problem)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_split_of_a_hub_id_is_read(hub: Hub) -> None:
    assert texts("team/rows") == TRAIN
    assert texts("team/rows", split="train[:20%]+test[-3:]") == TRAIN[:40] + TEST[-3:]
    assert texts("hf://datasets/team/rows/te*.jsonl") == TEST
    assert texts("team/rows", split="test", limit=4) == TEST[:4]


def test_cached_commit_needs_no_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.repos["datasets/team/rows"].revisions["main"]
    assert texts("team/rows") == TRAIN
    hub.asked.clear()
    assert texts(f"team/rows@{commit}") == TRAIN
    assert not hub.asked
    offline(monkeypatch)
    assert texts("team/rows") == TRAIN


def test_only_files_of_the_split_are_downloaded(hub: Hub) -> None:
    texts("team/rows", split="test")
    downloaded = {path.rpartition("/")[2] for path in hub.asked if path.startswith("GET /datasets")}
    assert downloaded == {"README.md", "test.jsonl"}


def test_large_download_is_a_line_of_a_log(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repository, "_WORTH_A_LINE", 900)
    texts("team/rows", split="test")
    assert capsys.readouterr().err == "downloading team/rows: 0.000944 MiB\n"
    texts("team/rows", split="test")
    assert capsys.readouterr().err == ""


def test_download_resumes_after_half_a_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.faults["GET /datasets/team/rows/resolve/"] = [None, 0.5, None]
    assert texts("team/rows", split="test") == TEST
    [wanted] = hub.ranges
    start = int(wanted.removeprefix("bytes=").rstrip("-"))
    assert 0 < start <= len(FILES["test.jsonl"]) / 2


def test_failed_file_ends_the_downloads_of_the_others(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an error, or Ctrl-C, would wait for gigabytes."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10)
    hub.dataset("team/rows", {"train-00000-of-00002.jsonl": lines(TRAIN * 500)})
    hub.faults["train-00001"] = [404]
    progress: list[repository.Downloading] = []
    with pytest.raises(ConfigError, match="train-00001"):
        FileSelection(["team/rows"]).fetch(progress.append)
    assert all(state.done < state.total / 2 for state in progress)


def test_full_disk_is_one_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert refusal("team/rows") == (
        "data.files=team/rows: README.md: can't be downloaded: [Errno 28] No space left on device"
    )


def test_download_that_always_ends_early_is_one_error(hub: Hub) -> None:
    hub.faults["test.jsonl"] = [None, 0.5]
    text = refusal("team/rows", split="test")
    assert text.startswith("data.files=team/rows: test.jsonl: the download ended early (3 tries)")
    hub.faults.clear()
    assert texts("team/rows", split="test") == TEST  # no broken file is left


def test_server_error_is_tried_again_and_then_one_error(hub: Hub) -> None:
    hub.faults["/api/datasets/team/rows"] = [500, 503, None]
    assert texts("team/rows") == TRAIN
    hub.dataset("team/more", FILES)
    hub.faults["/api/datasets/team/more"] = [500]
    assert refusal("team/more") == (
        "data.files=team/more: the Hub answered with status 500 (3 tries); try again later"
    )


def test_missing_gated_and_forbidden_repositories_are_refused(hub: Hub) -> None:
    assert "no such data set on the Hub; if it is private, log in" in refusal("team/none")
    hub.repos["datasets/team/rows"].gated = True
    assert refusal("team/rows") == (
        f"data.files=team/rows: is gated; ask for access at {hub.url}/datasets/team/rows, then log "
        "in with hf auth login, or set HF_TOKEN"
    )
    hub.faults["/api/datasets/team/rows"] = [403]
    assert "the Hub refuses it (403); log in with hf auth login" in refusal("team/rows")
    hub.faults["/api/datasets/team/rows"] = [401]
    assert "the Hub refuses it (401); log in with hf auth login" in refusal("team/rows")
    hub.faults["/api/datasets/team/rows"] = [404]
    assert "answers that it is not there (404); check it, and HF_ENDPOINT" in refusal("team/rows")
    assert "the Hub has no revision v9 of it" in refusal_at(hub, "v9")


def refusal_at(hub: Hub, revision: str) -> str:
    hub.faults.clear()
    hub.repos["datasets/team/rows"].gated = False
    return refusal(f"team/rows@{revision}")


def test_unknown_split_and_subset_list_what_exists(hub: Hub) -> None:
    assert refusal("team/rows", split="tran[:10]") == (
        "data.split=tran[:10]: team/rows: there is no such split; use train, test"
    )
    assert refusal("team/rows", subset="en") == (
        "data.subset=en: team/rows: there is no such subset; use default"
    )
    assert "no file of it matches; it has README.md, test.jsonl" in refusal(
        "hf://datasets/team/rows/*.parquet"
    )


def test_offline_is_an_error_without_a_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    assert refusal("team/rows@v1") == (
        "data.files=team/rows@v1: is not in the cache of the Hub, and HF_HUB_OFFLINE is set; where "
        "there is a network, run hf download team/rows --repo-type dataset --revision v1"
    )
    assert not hub.asked


def test_no_network_is_an_error_that_says_so(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub("http://127.0.0.1:9").use(tmp_path, monkeypatch)  # a port that nothing listens to
    text = refusal("team/rows")
    assert text.startswith(
        "data.files=team/rows: is not in the cache of the Hub, and the Hub can't"
    )
    assert "run hf download team/rows --repo-type dataset" in text


def test_lost_network_uses_the_last_download_and_says_so(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.repos["datasets/team/rows"].revisions["main"]
    assert texts("team/rows") == TRAIN
    Hub("http://127.0.0.1:9").use(tmp_path, monkeypatch)
    assert texts("team/rows") == TRAIN
    note = capsys.readouterr().err
    assert note.startswith("team/rows: the Hub can't be reached: ")
    assert note.endswith(f"; the commit of the last download is used, {commit[:8]}\n")


def test_interrupted_download_is_not_read_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run would train on a part of the rows and not say so."""
    hub.faults["train-00001"] = [500]
    assert "status 500" in refusal("team/rows")
    offline(monkeypatch)
    text = refusal("team/rows")
    assert ".jsonl is not in the cache of the Hub, and HF_HUB_OFFLINE is set" in text


def test_partial_snapshot_of_another_tool_is_refused_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repos["datasets/team/rows"].revisions["main"]
    for name in ("train-00000-of-00002.jsonl", "test.jsonl"):
        huggingface_hub.hf_hub_download("team/rows", name, repo_type="dataset")
    offline(monkeypatch)
    assert "only partly in the cache of the Hub" in refusal(f"team/rows@{commit}")


def test_snapshot_of_another_tool_is_read_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub.snapshot_download("team/rows", repo_type="dataset")
    offline(monkeypatch)
    assert texts("team/rows") == TRAIN


def test_pinned_data_stays_when_the_hub_has_a_new_commit(hub: Hub) -> None:
    first = hub.repos["datasets/team/rows"].revisions["main"]
    config = DocumentsConfig(
        files=["team/rows"], held_out=HeldOutConfig(files=["team/rows@main"], split="test")
    )
    pinned = pinned_data(config, earlier={})
    assert pinned.files == [f"team/rows@{first}"]
    assert pinned.held_out_files.files == [f"team/rows@{first}"]
    second = hub.dataset("team/rows", {"train.jsonl": lines(["new"])})
    settings = {"data.files": pinned.files, "data.name": "documents"}
    assert pinned_data(config, earlier=commits_in(settings)).files == [f"team/rows@{first}"]
    assert pinned_data(config, earlier={}).files == [f"team/rows@{second}"]
    named = DocumentsConfig(files=[f"team/rows@{second}"])
    assert pinned_data(named, earlier=commits_in(settings)).files == [f"team/rows@{second}"]


def test_sources_of_a_mix_are_pinned_and_fetched(hub: Hub) -> None:
    commit = hub.dataset("team/other", {"a.jsonl": lines(TEST)})
    mix = {"a": {"files": ["team/rows"], "split": "test"}, "b": {"files": ["team/other"]}}
    pinned = pinned_data(DocumentsConfig(mix=mix), earlier={})
    assert pinned.mix["b"]["files"] == [f"team/other@{commit}"]
    progress: list[repository.Downloading] = []
    fetch_data(pinned, report=progress.append)
    assert str(progress[-1]).startswith("downloading ████")
    assert {state.repo for state in progress} == {"team/rows", "team/other"}
    hub.asked.clear()
    build_dataset(pinned, TokenizerConfig(name="bytes"))
    assert not hub.asked


def test_problems_of_all_data_sets_are_reported_together(hub: Hub) -> None:
    mix = {"a": {"files": ["team/none"]}, "b": {"files": ["team/rows", "team/nothing"]}}
    with pytest.raises(ConfigError) as error:
        pinned_data(DocumentsConfig(mix=mix), earlier={})
    keys = [(problem.key, problem.value) for problem in error.value.problems]
    assert keys == [("data.mix.a.files", "team/none"), ("data.mix.b.files", "team/nothing")]


Built = Callable[..., Any]


@pytest.fixture
def built(hub: Hub, tmp_path: Path) -> Built:
    def build(**keys: Any) -> Any:
        arguments = {"files": ["team/rows"], "sequence_length": 16, "packing": "none", **keys}
        config = DocumentsConfig(cache_dir=str(tmp_path / "tokens"), **arguments)
        return build_dataset(config, TokenizerConfig(name="bytes"))

    return build


def test_validation_split_is_held_out(built: Built) -> None:
    dataset = built(validation_split="test[:10]", limit=30)
    assert (dataset.num_samples, dataset.num_eval_samples) == (30, 10)
    assert dataset.decode(dataset.samples([0], split="eval").inputs[0].tolist()).startswith("test ")


def test_parts_of_one_split_may_be_trained_on_and_held_out(built: Built) -> None:
    dataset = built(split="train[:90%]", validation_split="train[90%:]")
    assert (dataset.num_samples, dataset.num_eval_samples) == (180, 20)
    with pytest.raises(ConfigError, match=r"data.validation_split=train\[80%:\]: rows of hf:.*"):
        built(split="train[:90%]", validation_split="train[80%:]")


def test_held_out_files_have_their_own_split_and_limit(built: Built) -> None:
    held_out = HeldOutConfig(files=["team/rows"], split="test", limit=7)
    assert built(held_out=held_out).num_eval_samples == 7
    with pytest.raises(ConfigError, match=r"data.held_out.split=dev: team/rows: there is no such"):
        built(held_out=HeldOutConfig(files=["team/rows"], split="dev"))


def test_file_names_with_control_characters_are_refused(hub: Hub) -> None:
    hub.dataset("team/rows", {"\x1b[31m.jsonl": ""})
    assert refusal("team/rows").endswith("has a file whose name has control characters")


def test_hub_url_of_another_kind_of_repository_is_refused(hub: Hub) -> None:
    assert "write hf://datasets/ORG/NAME/FILES" in refusal("hf://team/rows/train.jsonl")


def test_missing_library_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(axonlaunch.system.hub, "library", axonlaunch.system.hub.library.__wrapped__)
    text = "data.files=team/rows: the Hub needs huggingface_hub; pip install 'axonlaunch[hf]'"
    assert refusal("team/rows") == text
    with pytest.raises(ConfigError, match="the Hub needs huggingface_hub"):
        pinned_data(DocumentsConfig(files=["team/rows"]), earlier={})


def test_existing_folder_has_priority(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "team" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "it is a folder; write team/rows/**/*.jsonl" in refusal("team/rows")


def test_nodes_that_found_other_commits_agree() -> None:
    from axonlaunch.launch.multinode.node_settings import check_agreement

    commits = ["0123456789" * 4, "9876543210" * 4]
    met = [
        {"host": "a", "problems": [], "config": {"data.files": [f"team/rows@{commit}"]}}
        for commit in commits
    ]
    check_agreement(met)
    with pytest.raises(ConfigError, match="start every node with the same overrides"):
        check_agreement([*met, {**met[0], "config": {"data.files": ["team/others"]}}])


@pytest.mark.parametrize("key", ["data.template_date", "data.mix.a.template_date"])
def test_nodes_that_began_on_other_days_agree(key: str) -> None:
    from axonlaunch.launch.multinode.node_settings import check_agreement

    days = ["2026-11-29", "2026-11-30"]
    check_agreement([{"host": "a", "problems": [], "config": {key: day}} for day in days])


def test_node_downloads_the_data_of_a_frozen_configuration(hub: Hub) -> None:
    from support.configured import run_config

    from axonlaunch.preflight.checks import fetch_model_and_data

    first = hub.repos["datasets/team/rows"].revisions["main"]
    data = ["data=documents", "data.files=[team/rows]", "data.sequence_length=16"]
    frozen = run_config([*data, "strategy=single", "train.global_batch_size=4"])
    assert frozen.data.files == [f"team/rows@{first}"]  # type: ignore[attr-defined]
    hub.dataset("team/rows", {"train.jsonl": lines(["new"])})
    hub.asked.clear()
    fetch_model_and_data(frozen)
    assert not hub.asked


def test_run_goes_on_with_the_commit_of_its_checkpoint(hub: Hub, tmp_path: Path) -> None:
    from support.configured import run_config

    from axonlaunch.checkpoint import Retention
    from axonlaunch.checkpoint.saving.saver import Saver
    from axonlaunch.comm import World
    from axonlaunch.config import to_yaml
    from axonlaunch.models.build import build_model
    from axonlaunch.models.modules.module_state import model_state
    from axonlaunch.preflight.checkpoint import resumed_settings

    overrides = [
        *("data=documents", "data.files=[team/rows]", "data.sequence_length=16"),
        *("strategy=single", "train.global_batch_size=4", "name=a", f"run_dir={tmp_path / 'a'}"),
    ]
    first = run_config(overrides)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(to_yaml(first))

    def on_rank(world: World) -> None:
        saver = Saver(tmp_path / "a", world=world, retention=Retention(newest=1))
        saver.save({"model": model_state(build_model(first.model, seed=1))}, step=1, samples=4)

    assert resumed_settings(first) == {}
    World.mock(1).run(on_rank)
    hub.dataset("team/rows", {"train.jsonl": lines(["new"])})
    earlier = commits_in(resumed_settings(first))
    assert first.data.files == [f"team/rows@{earlier['team/rows']}"]  # type: ignore[attr-defined]
