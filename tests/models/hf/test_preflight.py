"""Errors of model=hf before a rank starts, and downloading by a model id."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from support.configured import estimate_config, run_config
from support.hf_families import FAMILIES, save

from axonlaunch.config import ConfigError, with_values
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.config.problems.errors import plain
from axonlaunch.config.registry import Needs
from axonlaunch.models.hf.reading import files, library


def overrides_of(kind: str, **changes: Any) -> list[str]:
    content = plain({**FAMILIES[kind], **changes}).replace(":", ": ")
    return ["model=hf", f"model.config={content}", "model.init=random", "data=synthetic_tokens"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_config(["data.sequence_length=32", *overrides])
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (
            ["strategy=tensor", "strategy.tensor.degree=3", "launch.nproc=3"],
            "strategy.tensor.degree=3: ",
        ),
        (
            ["strategy=pipeline", "strategy.pipeline.degree=4", "launch.nproc=4"],
            "strategy.pipeline.degree=4: ",
        ),
        (["data.sequence_length=129"], "data.sequence_length=129: longer than model.config.max_"),
        (["data.vocab_size=300"], "model.config: its embedding model.embed_tokens has 256"),
        (["model.attention=flex"], "model.attention=flex: torch can't train with it on CPUs"),
        (["model.attention=fast"], "model.attention=fast: use auto, sdpa, flex or eager"),
    ],
)
def test_unsupported_hf_settings_are_refused(overrides: list[str], reported: str) -> None:
    assert refusal(*overrides_of("llama"), *overrides).startswith(reported)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("llama", "use 128 or less, or set model.config={max_position_embeddings: 200}"),
        ("gpt2", "use 128 or less, because its weights have a row for each position"),
        ("opt", "use 128 or less, because its weights have a row for each position"),
    ],
)
def test_rows_longer_than_pretrained_positions_name_the_remedy(
    kind: str, remedy: str, tmp_path: Path
) -> None:
    save(kind, tmp_path)
    rows = ["model=hf", f"model.path={tmp_path}", "data=synthetic_tokens"]
    rows += ["data.sequence_length=200"]
    assert refusal(*rows).endswith(
        f"longer than model.config.max_position_embeddings=128; {remedy}"
    )
    if kind == "llama":
        run_config([*rows, "model.config={max_position_embeddings: 200}"])


def test_sizes_that_fail_in_forward_are_refused() -> None:
    error = refusal(*overrides_of("qwen3", num_key_value_heads=3))
    assert error.startswith("model.config: its forward fails with RuntimeError: ")


def test_an_attention_that_a_family_lacks_is_refused() -> None:
    error = refusal(*overrides_of("bloom"), "model.attention=sdpa")
    assert error.startswith("model.attention=sdpa: the model refuses it (BloomForCausalLM does not")
    assert error.endswith("); use auto")


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ([], "model.path=null: is missing; write a folder or a model id"),
        (
            ["model.config={model_type: gpt2}"],
            "model.init=pretrained: model.path names no weights to read; use random",
        ),
        (["model.path=''"], "model.path=: is empty"),
        (["model.hidden_size=64"], "model.hidden_size=64: there is no such key here, only in"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(
    settings: list[str], reported: str
) -> None:
    assert reported in refusal("model=hf", *settings)


def test_missing_transformers_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Needs, "is_missing", property(lambda needs: needs.module == "transformers"))
    expected = "model.name=hf: transformers is not installed; pip install 'axonlaunch[hf]'"
    assert expected in refusal(*overrides_of("llama"))


@pytest.mark.parametrize("version", ["4.57.1", "5.8.1"])
def test_an_old_transformers_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"transformers {version} is installed, but 5\.9"):
        library.transformers.__wrapped__()


def test_flex_attention_is_not_estimated() -> None:
    from axonlaunch.planning.memory.estimate import estimate

    chosen = estimate_config(
        [*overrides_of("llama"), "model.attention=flex", "data.sequence_length=32"]
    )
    with pytest.raises(ConfigError, match="can't be run without values; use sdpa to estimate"):
        estimate(chosen)


def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Hub cache that contains the description of a model."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--someone--small" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "models--someone--small" / "refs").mkdir()
    (cache / "models--someone--small" / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text(json.dumps(FAMILIES["qwen3"]))
    return snapshot


ID = HuggingFaceConfig(path="someone/small")


def test_a_model_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached(tmp_path, monkeypatch)
    assert files.folder(ID) == snapshot
    assert files.fetch(ID, weights=False) == snapshot
    chosen = run_config(["model=hf", "model.path=someone/small", "model.init=random"])
    assert chosen.model == HuggingFaceConfig(path="someone/small", init="random")


def test_weights_that_are_not_in_the_cache_are_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(tmp_path, monkeypatch)
    requests = []

    def download(path: str, **how: Any) -> str:
        requests.append((path, how))
        save("qwen3", snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for _ in range(2):
        run_config(["model=hf", "model.path=someone/small", "data.sequence_length=32"])
    [(path, how)] = requests
    assert path == "someone/small"
    assert "*.safetensors" in how["allow_patterns"]
    assert not any(pattern.endswith(".py") for pattern in how["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "cause", "is_transient"),
    [
        (OfflineModeIsEnabled("offline"), None, False),
        (LocalEntryNotFoundError("offline"), OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), False),
        (LocalEntryNotFoundError("no answer"), ConnectionError(), True),
    ],
)
def test_offline_without_cache_is_error_at_once(
    error: Exception,
    cause: Exception | None,
    is_transient: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached(tmp_path, monkeypatch)

    def download(path: str, **how: Any) -> str:
        raise error from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError) as caught:
        run_config(["model=hf", "model.path=someone/other", "data.sequence_length=32"])
    [problem] = caught.value.problems
    text = str(problem)
    assert text.startswith("model.path=someone/other: there is no such folder, it is not in the")
    assert "hf download someone/other" in text
    assert problem.is_transient == is_transient


@pytest.mark.parametrize(
    ("status", "text", "is_transient"),
    [
        (403, "the Hub refuses it (403); log in with hf auth login", False),
        (404, "there is no such folder, and no such model on the Hub", False),
        (429, "the Hub answered with status 429", True),
        (503, "the Hub answered with status 503", True),
    ],
)
def test_busy_hub_is_a_transient_problem_of_a_model(
    status: int, text: str, is_transient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(tmp_path, monkeypatch)

    def download(path: str, **how: Any) -> str:
        error = HfHubHTTPError.__new__(HfHubHTTPError)  # its arguments differ between versions
        error.response = cast("Any", SimpleNamespace(status_code=status))
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        files.fetch(HuggingFaceConfig(path="someone/other"), weights=True)
    assert [problem.is_transient for problem in caught.value.problems] == [is_transient]


def test_a_folder_is_found_from_any_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen3", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    chosen = run_config(["model=hf", "model.path=model", "data.sequence_length=32"])
    assert chosen.model.path == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("rank", "local_rank", "fetches"),
    [(0, 0, False), (1, 1, False), (2, 0, True), (3, 1, False)],  # rank 0 has it in its cache
)
def test_one_rank_per_node_downloads_model_under_other_launchers(
    rank: int,
    local_rank: int,
    fetches: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
    from axonlaunch.launch.external.rank import fetch_for_node

    snapshot = cached(tmp_path, monkeypatch)
    chosen = run_config(["model=hf", "model.path=someone/small", "model.init=random"])
    chosen = with_values(chosen, {"model.init": "pretrained"})
    requests = []

    def download(path: str, **how: Any) -> str:
        requests.append(path)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_for_node(chosen, ClusterEnvironment(rank=rank, local_rank=local_rank, world_size=4))
    assert bool(requests) == fetches
