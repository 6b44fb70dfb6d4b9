"""``axonlaunch checkpoint``: listing, finding, comparing, writing, and errors."""

from __future__ import annotations

import json

import pytest
from support.command import Served
from support.served import Server


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    """Return the command in a folder with two runs of 6 steps, saved every third."""
    command = Served(tmp_path_factory.mktemp("runs"), server)
    command.train("strategy=fsdp", "name=a", "checkpoint.every=3", "train.eval_every=3")
    command.train("strategy=ddp", "name=b", "checkpoint.every=6", "seed=1")
    return command


@pytest.mark.slow
def test_ls_reports_step_size_age_layout_and_losses(trained: Served) -> None:
    text = trained("checkpoint", "ls", "runs/a").stdout
    heading, first, second = text.splitlines()
    assert heading.split() == ["step", "size", "saved", "layout", "ranks", "loss", "evaluation"]
    assert first.split()[0] == "3"
    assert "fsdp 2" in second
    assert "MiB" in second
    assert " ago" in second
    reported = json.loads(trained("checkpoint", "ls", "runs/a", "--json").stdout)
    assert [entry["step"] for entry in reported["checkpoints"]] == [3, 6]
    assert reported["checkpoints"][1]["loss"] == trained.losses("a")[-1]
    assert reported["checkpoints"][1]["eval_loss"] == trained.summary("a")["eval_loss"]
    assert reported["checkpoints"][1]["bytes"] > 10_000
    assert reported["corrupt"] == {}
    stdout = trained("checkpoint", "ls", "runs/a/checkpoints/step_3", "--json").stdout
    assert [c["step"] for c in json.loads(stdout)["checkpoints"]] == [3]


def test_check_reads_all_again(trained: Served) -> None:
    ran = trained("checkpoint", "check", "runs/a")
    assert ran.stdout.splitlines() == [
        "intact  runs/a/checkpoints/step_3",
        "intact  runs/a/checkpoints/step_6",
    ]
    file = trained.folder / "runs/b/checkpoints/step_6/__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        ran = trained("checkpoint", "check", "runs/b", status=1)
        assert ran.stdout.splitlines() == [
            "corrupt  runs/b/checkpoints/step_6",
            "  __1_0.distcp is not what was written (its CRC-32 differs)",
        ]
        file.write_bytes(content[:-1])
        reported = json.loads(trained("checkpoint", "check", "runs/b", "--json", status=1).stdout)
        assert not reported["passed"]
        [reason] = reported["checkpoints"]["runs/b/checkpoints/step_6"]
        assert reason == f"has {len(content) - 1} bytes of __1_0.distcp instead of {len(content)}"
    finally:
        file.write_bytes(content)


def test_diff_names_the_parameters_that_are_farthest_apart(trained: Served) -> None:
    assert trained("checkpoint", "diff", "runs/a", "runs/a").stdout == "bitwise equal\n"
    reported = json.loads(
        trained("checkpoint", "diff", "runs/a", "runs/b", "--json", status=1).stdout
    )
    assert not reported["equal"]
    first, second, *_ = reported["differences"]
    assert first["name"].startswith("model.")
    assert first["largest"] >= second["largest"] > 0
    text = trained("checkpoint", "diff", "runs/a", "runs/b", status=1).stdout
    verdict, head, most = text.splitlines()[:3]
    assert verdict == f"{len(reported['differences'])} tensors differ"
    assert head.split() == ["tensor", "largest", "difference", "relative"]
    assert most.split()[0] == first["name"]
    assert text.splitlines()[-1].endswith(" more; use --json to list all")


def test_diff_exits_0_only_where_two_checkpoints_are_equal(trained: Served) -> None:
    for json_option in ([], ["--json"]):
        trained("checkpoint", "diff", "runs/a", "runs/a", *json_option, status=0)
        trained("checkpoint", "diff", "runs/a", "runs/b", *json_option, status=1)
        trained("checkpoint", "diff", "runs/a", "nowhere", *json_option, status=2)


@pytest.mark.slow
def test_exported_weights_import_and_train(trained: Served) -> None:
    shown = trained("checkpoint", "export", "runs/a", "shown").stderr
    assert "use model=hf model.init=random" in shown
    reported = json.loads(trained("checkpoint", "export", "runs/a", "out", "--json").stdout)
    assert reported["files"] == ["model.safetensors", "config.json"]
    trained("checkpoint", "import", "out", "runs/c")
    reported = json.loads(
        trained("checkpoint", "diff", "runs/a", "runs/c", "--json", status=1).stdout
    )
    assert not [d for d in reported["differences"] if d["name"].startswith("model.")]
    losses = {}
    for name, path in (("out", "out"), ("run", "runs/a"), ("imported", "runs/c")):
        trained.train("strategy=fsdp", f"name=from-{name}", f"model.weights={path}")
        losses[name] = trained.losses(f"from-{name}")
    assert losses["out"] == losses["run"] == losses["imported"]
    assert losses["out"] != trained.losses("a")


def test_without_a_command_it_shows_its_own(trained: Served) -> None:
    text = trained("checkpoint").stdout
    assert "axonlaunch checkpoint diff runs/a" in text
    for name in ("ls", "check", "diff", "export", "import"):
        assert f"  {name} " in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ls", "nowhere"], "nowhere: there is no such folder"),
        (["diff", "runs/a", "runs"], "runs: contains no checkpoint; give a run or a checkpoint"),
        (["export", "runs/a", "runs"], "runs: is there already; give a new folder"),
        (["export", "runs/a", "x", "--format", "onnx"], "--format=onnx: is not supported; "),
        (["export", "runs/a", "x", "--dtype", "int8"], "--dtype=int8: is not supported; use "),
        (["export", "runs/a", "x", "--file-gb", "inf"], "--file-gb=inf: "),
        (["import", "runs/a", "runs/x"], "runs/a/config.json: can't be read: "),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    overrides: list[str], message: str, trained: Served
) -> None:
    ran = trained("checkpoint", *overrides, status=2)
    [error] = ran.stderr.splitlines()
    assert error.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.weights=nowhere"], "model.weights=nowhere: there is no such folder; give a run"),
        (["model.weights=runs"], "model.weights=runs: runs: contains no *.safetensors and no chec"),
        (
            ["model.weights=runs/a", "model.num_hidden_layers=3"],
            "model.weights=runs/a: they were saved with a different model: layers.2.input_layer",
        ),
        (
            ["model.weights=runs/a", "checkpoint.resume=runs/b", "train.steps=9"],
            "model.weights=runs/a: checkpoint.resume=runs/b contains weights already; use null",
        ),
        (
            ["checkpoint.async_save=true", "launch.backend=mock"],
            "checkpoint.async_save=true: launch.backend=mock runs one rank at a time",
        ),
    ],
)
def test_weights_that_do_not_fit_start_no_rank(
    overrides: list[str], message: str, trained: Served
) -> None:
    ran = trained.train("name=new", *overrides, status=2)
    assert f"error: {message}" in ran.stderr
    assert not (trained.folder / "runs" / "new").exists()
