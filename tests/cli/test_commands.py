"""Commands other than train: their output as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import Served
from support.served import Server

from axonlaunch.cli.configuration.doctor import _figures
from axonlaunch.cli.configuration.ls import ALIASES, LISTS

COMMANDS = [
    "train",
    "profile",
    "sample",
    "config",
    "schedule",
    "verify",
    "inspect",
    "ls",
    "doctor",
    "help",
]


@pytest.fixture
def run(tmp_path: Path, server: Server) -> Served:
    return Served(tmp_path, server)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, run: Served) -> None:
    text = run(command, "--help").stdout
    assert "Examples:" in text
    assert f"axonlaunch {command}" in text
    assert "--json" in text


def test_without_a_command_the_help_is_shown(run: Served) -> None:
    text = run().stdout
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trian"], "error: there is no command 'trian'; did you mean axonlaunch train?"),
        (
            ["checkpoint", "merge"],
            "error: there is no command 'merge'; did you mean axonlaunch checkpoint export --me",
        ),
        (["submit"], "error: there is no command 'submit'; did you mean axonlaunch train launch="),
        (
            ["train", "--fast"],
            "error: --fast: there is no such option; see --help for options; settings are",
        ),
        (["ls", "modles"], "error: there is no group 'modles'; did you mean model?"),
        (["sample"], "error: FOLDER: is missing: folder of a run with a checkpoint, or of "),
        (["sample", "a", "--top-p", "2"], "error: --top-p=2: "),
        (["verify", "--steps=x"], "error: --steps=x: "),
        (["verify", "--reference", "bf16"], "error: --reference=bf16: 'bf16' is not one of "),
        (["estimate", "--plot"], "error: --plot: requires an argument"),
        (["sample", "nowhere"], "error: nowhere: there is no such folder"),
        (["config", "train.stepz=1"], "error: train.stepz=1: there is no such key"),
        (["doctor", "--ranks", "0"], "error: --ranks=0: must be at least 1"),
        (["doctor", "--ranks", "99999"], "error: --ranks=99999: is too many for this node's cores"),
        (
            ["doctor", "--write", "hardware/a.yaml"],
            "error: --write=hardware/a.yaml: needs measured figures; add --measure",
        ),
        (
            ["doctor", "--measure", "--write", "a.yaml"],
            "error: --write=a.yaml: must be in a folder named hardware; write hardware/a.yaml",
        ),
        (["doctor", "--run-dir", __file__], f"error: --run-dir={__file__}: "),
        (["verify", "--dump", "/proc/x"], "error: --dump=/proc/x: can't be written: "),
        (["verify", "--dump", f"{__file__}/x"], f"error: --dump={__file__}/x: can't be written: "),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    overrides: list[str], message: str, run: Served
) -> None:
    ran = run(*overrides, status=2)
    assert ran.stdout == ""
    assert ran.stderr.startswith(message)
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (
            ["plan", "--devices", "0", "--write", "a.txt", "--allow", "speed", "--tokens", "x"],
            ["--devices=0", "--write=a.txt", "--allow=speed", "--tokens=x"],
        ),
        (
            ["estimate", "--exact", "--analytic", "--plot", "a.pdf", "--tokens", "x"],
            ["--analytic", "--plot=a.pdf", "--tokens=x"],
        ),
        (["train", "--samples", "3", "--parallel", "2"], ["--samples=3", "--parallel=2"]),
        (
            ["checkpoint", "export", "nowhere", "--private", "--dtype", "int8"],
            ["OUT", "--private", "--dtype=int8", "nowhere"],
        ),
    ],
)
def test_all_wrong_options_are_reported_at_once(
    arguments: list[str], keys: list[str], run: Served
) -> None:
    lines = run(*arguments, status=2).stderr.splitlines()
    assert [line.removeprefix("error: ").partition(": ")[0] for line in lines] == keys


def test_unknown_option_says_how_settings_are_written(run: Served) -> None:
    error = run("train", "--nnodes", "2", status=2).stderr  # which resembles --render
    assert error.startswith("error: --nnodes: there is no such option; see --help")
    assert error.endswith("settings are written key=value, without dashes\n")


def test_programs_get_a_mistake_as_an_object_too(run: Served) -> None:
    ran = run("config", "train.stepz=1", "optimizer.lr=fast", "--json", status=2)
    assert len(ran.stderr.splitlines()) == 2
    assert json.loads(ran.stdout) == {
        "errors": [
            {"key": "optimizer.lr", "message": "expected a number"},
            {
                "key": "train.stepz",
                "message": "there is no such key; did you mean train.steps?",
            },
        ]
    }
    usage = run("config", "--fast", "--json", status=2)
    [error] = json.loads(usage.stdout)["errors"]
    assert error["key"] == "--fast"


@pytest.mark.parametrize(
    ("singular", "plural"),
    [
        ("model", "models"),
        ("adapter", "adapters"),
        ("dataset", "datasets"),
        ("tokenizer", "tokenizers"),
        ("strategy", "strategies"),
        ("optimizer", "optimizers"),
        ("scheduler", "schedulers"),
        ("launcher", "launchers"),
        ("logger", "loggers"),
        ("loss", "losses"),
        ("experiment", "experiments"),
    ],
)
def test_ls_takes_a_group_in_the_singular_and_in_the_plural(singular: str, plural: str) -> None:
    assert ALIASES.get(singular) == ALIASES.get(plural, plural) in LISTS


def test_ls_takes_a_group_as_overrides_name_it() -> None:
    assert {ALIASES.get(group, group) for group in LISTS.values()} == {*LISTS}


def test_ls_lists_plugin_registrations(run: Served, tmp_path: Path) -> None:
    (tmp_path / "listed_plugin.py").write_text(
        "import axonlaunch as ax\n"
        "@ax.register_logger('lines_of_text')\n"
        "class Lines(ax.Logger):\n"
        "    'A line a step.'\n"
    )
    listed = json.loads(run("ls", "logger", "--plugin", "listed_plugin", "--json").stdout)
    assert listed["loggers"]["lines_of_text"] == "A line a step."
    assert "lines_of_text" not in run("ls", "loggers").stdout
    assert "no module nowhere" in run("ls", "--plugin", "nowhere", status=2).stderr


def test_config_prints_yaml_that_is_the_configuration(run: Served, tmp_path: Path) -> None:
    text = run("config", "strategy=hsdp", "train.steps=7").stdout
    (tmp_path / "config.yaml").write_text(text)
    again = run("config", "--config-dir", ".", "--config-name", "config").stdout
    assert again == text
    assert "sharding: hybrid_shard" in text


def test_config_prints_values_that_auto_resolves_to(run: Served) -> None:
    overrides = ["strategy=fsdp", "strategy.pipeline.degree=2", "train.global_batch_size=32"]
    printed = json.loads(run("config", *overrides, "--json").stdout)
    assert printed["strategy"]["data_parallel"] == "fsdp"
    ranks = printed["launch"]["nproc"]
    share = 32 // (ranks // 2)
    assert printed["launch"]["backend"] in ("gloo", "nccl")
    assert printed["strategy"]["pipeline"]["stages_per_rank"] == 1
    count = printed["strategy"]["pipeline"]["microbatches"]
    assert printed["train"]["micro_batch_size"] * count == share
    assert printed["scheduler"]["warmup_steps"] == printed["train"]["steps"] // 15
    configuration = json.loads(run("config", "strategy=single", "--json").stdout)
    assert configuration["launch"]["nproc"] == 1
    assert configuration["train"]["micro_batch_size"] == configuration["train"]["global_batch_size"]


def test_config_explains_resolved_auto(run: Served) -> None:
    overrides = ["config", "launch.nproc=2", "--explain", "--json"]
    explained = json.loads(run(*overrides).stdout)
    assert explained["train.micro_batch_size"] == {
        "value": 8,
        "origin": "automatic: config.yaml has auto",
    }
    assert explained["strategy.data_parallel"]["value"] == "ddp"


def test_config_refuses_a_batch_that_the_ranks_here_cannot_share(run: Served) -> None:
    overrides = ["config", "launch.nproc=2", "train.global_batch_size=15"]
    ran = run(*overrides, status=2)
    assert ran.stderr.startswith("error: train.global_batch_size=15: must be divisible by 2 ranks")


def test_config_explains_where_each_value_comes_from(run: Served) -> None:
    overrides = ["config", "strategy=hsdp", "train.steps=7", "--explain"]
    lines = dict(line.rsplit("  ", 1) for line in run(*overrides).stdout.splitlines())
    lines = {key.strip(): origin for key, origin in lines.items()}
    assert lines["strategy.fsdp.sharding=hybrid_shard"] == "strategy/hsdp.yaml"
    assert lines["train.steps=7"] == "override train.steps=7"
    assert lines["train.compile=false"] == "default"
    explained = json.loads(run(*overrides, "--json").stdout)
    assert explained["train.steps"] == {"value": 7, "origin": "override train.steps=7"}


def test_config_describes_meaning_and_type_of_each_key(run: Served) -> None:
    text = run("config", "train.grad_clip=2", "--describe").stdout
    assert "\ntrain.grad_clip=2.0\n    number, above 0 | null\n    largest norm of the" in text
    reported = json.loads(run("config", "--describe", "--json").stdout)["train.steps"]
    assert reported == {
        "value": 450,
        "allowed": "whole number, at least 1 | auto",
        "meaning": "number of optimizer steps; auto: computed from epochs",
    }
    both = run("config", "--describe", "--explain", status=2)
    assert both.stderr == "error: use only one of --explain, --describe and --schema\n"


def test_ls_lists_every_kind_with_description(run: Served) -> None:
    listed = json.loads(run("ls", "--json").stdout)
    assert set(listed) >= {
        "models",
        "data",
        "strategies",
        "optimizers",
        "schedulers",
        "hardware",
        "experiments",
    }
    assert all(summary for options in listed.values() for summary in options.values())
    assert {"mlp", "gpt", "llama3_8b", "vit", "custom"} <= set(listed["models"])


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (["strategy", "strategies"], "hsdp"),
        (["scheduler", "schedulers", "schedules"], "cosine"),
        (["launch", "launcher", "launchers", "launches"], "slurm"),
        (["model", "models"], "gpt"),
        (["data", "datasets"], "digits"),
    ],
)
def test_ls_takes_a_groups_name_as_in_an_override_and_its_plural(
    names: list[str], option: str, run: Served
) -> None:
    texts = {run("ls", name).stdout for name in names}
    assert len(texts) == 1
    [text] = texts
    assert option in text.split()
    assert "hardware" not in text


def test_doctor_tries_every_backend_by_a_real_all_reduce(tmp_path: Path, server: Server) -> None:
    doctor = Served(tmp_path, server)
    report = json.loads(doctor("doctor", "--json").stdout)
    assert report["backends"]["gloo"]["works"]
    assert report["backends"]["mock"]["works"]
    assert report["backends"]["nccl"]["works"] or report["backends"]["nccl"]["reason"]
    assert report["cores"] >= 1
    assert report["disk_free_gib"] > 0
    assert list(tmp_path.iterdir()) == []
    assert "all-reduce over 2 ranks" in doctor("doctor").stdout


def test_doctor_prints_measured_bandwidth_of_ranks() -> None:
    measured = {
        "fp32_tflops": 0.0829,
        "bf16_tflops": 0.223,
        "fp16_tflops": 0.00265,
        "kernel_us": 4.0,
        "kernel_bytes": [2**18, 2**20],
        "kernel_latency_us": [1.0, 16.0],
    }
    gloo = {"link_latency_us": 1190.0, "link_gb_s": 1.01, "allgather_bw_gb_s": 0.435}
    assert dict(_figures(measured | gloo)) == {
        "matmul": "fp32 82.9 GFLOP/s, bf16 223 GFLOP/s, fp16 2.65 GFLOP/s",
        "kernels": "4 us, 52.4 GB/s for 1 MiB",
        "gloo": "1,190 us per hop, 1.01 GB/s, gathers 0.435",
    }
    assert "gloo" not in dict(_figures(measured))  # one rank has no peer
