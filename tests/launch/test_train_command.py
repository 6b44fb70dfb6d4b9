"""``axonlaunch train`` in real processes: its output, and equal results on every backend."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TINY, Command, wait_for

from axonlaunch import config as configuration
from axonlaunch.config.consistency.layout import resolved
from axonlaunch.launch.run_folder.names import default_name

LINE = {
    *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "peak_memory_bytes"),
    *("data_wait_s", "epoch", "tokens_seen"),
}


def test_run_writes_documented_files(served: Command) -> None:
    ran = served.train("+strategy=fsdp", "name=run", "checkpoint.every=4", "checkpoint.keep_last=1")
    folder = served.folder / "runs" / "run"
    assert set(served.lines("run")[0]) - {"slowest"} == LINE  # only there if a rank is slow
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_6"]
    summary = served.summary("run")
    assert (summary["status"], summary["steps"]) == ("done", 6)
    assert summary["first_step_s"] > 0
    assert summary["measured_peak_bytes"] > 0
    assert summary["loss"] == served.losses("run")[-1]
    assert "data_parallel: fsdp" in (folder / "config.yaml").read_text()
    assert "evaluation loss" in ran.stdout
    assert sorted(path.name for path in served.folder.iterdir()) == ["runs"]


def test_processes_mock_ranks_and_one_process_have_equal_losses(served: Command) -> None:
    served.train("strategy=single", "name=one")
    served.train("strategy=fsdp", "name=gloo")
    served.train("strategy=fsdp", "name=mock", "launch.backend=mock")
    served.train("strategy=ddp", "name=four", "launch.nproc=4", "train.micro_batch_size=1")
    alone = served.losses("one")
    assert len(alone) == 6
    for name in ("gloo", "mock", "four"):
        assert served.losses(name) == pytest.approx(alone, rel=1e-5), name


def test_rank_may_use_data_loader_workers(served: Command) -> None:
    (served.folder / "workers.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "from axonlaunch.training import worker\n"
        "real = worker.fit\n"
        "def fit(*args, **kwargs):\n"
        "    print('they say', [int(n) for n in DataLoader(range(3), num_workers=1)])\n"
        "    return real(*args, **kwargs)\n"
        "worker.fit = fit\n"
    )
    served.train("strategy=ddp", "plugins=[workers]", "name=run")
    for rank in range(2):
        log = served.folder / "runs/run/logs" / f"rank_{rank}.log"
        assert "they say [0, 1, 2]" in log.read_text()


@pytest.mark.slow  # test_truth has processes of a hybrid mesh, tests/parity its curve
def test_hybrid_mesh_of_eight_processes_equals_one_process(served: Command) -> None:
    """2 x 2 x 2 on the default data, as in the README's table of strategies."""
    common = ["train.steps=6", "train.log_every=1", "train.eval_batches=0", "checkpoint.every=0"]
    common += ["data.sequence_length=32", "model.num_hidden_layers=2", "model.hidden_size=64"]
    curves = {}
    for strategy in ("hybrid", "single"):
        overrides = ["train", f"strategy={strategy}", f"name={strategy}", *common]
        served(*overrides)
        curves[strategy] = served.losses(strategy)
    assert len(curves["hybrid"]) == 6
    assert curves["hybrid"] == pytest.approx(curves["single"], rel=1e-5)


def test_with_json_standard_output_is_one_object(served: Command) -> None:
    ran = served.train("name=run", "--json", "train.steps=2")
    assert json.loads(ran.stdout) == served.summary("run")


def test_an_unnamed_run_never_writes_into_another(served: Command) -> None:
    served.train("train.steps=1", "strategy=single")
    served.train("train.steps=1", "strategy=single")
    names = sorted(path.name for path in (served.folder / "runs").iterdir())
    assert names == ["gpt-single", "gpt-single-2"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["strategy=single"], "gpt-single"),
        (["strategy=fsdp"], "gpt-fsdp"),
        (["strategy=pipeline", "launch.nproc=2"], "gpt-pipeline"),
        (["strategy=hybrid", "launch.nproc=8"], "gpt-fsdp-tensor-pipeline"),
    ],
)
def test_an_unnamed_run_is_named_after_its_layout(overrides: list[str], name: str) -> None:
    config = resolved(configuration.load(overrides), accelerators=0)
    assert default_name(config) == name


@pytest.mark.slow
def test_hsdp_with_one_replica_has_note(served: Command) -> None:
    overrides = ["launch.nproc=2", "train.steps=1"]
    output = " ".join(served.train("strategy=hsdp", *overrides).stdout.split())
    assert "note strategy.fsdp.sharding=hybrid_shard: there is one replica" in output
    two = served.train("strategy=hsdp", "strategy.fsdp.replicate=2", *overrides).stdout
    assert "there is one replica" not in two


def test_sweep_runs_in_sequence_in_separate_folders(served: Command) -> None:
    ran = served.train("-m", "seed=0,1", "strategy=single", "name=sweep", "train.steps=2")
    losses = [served.losses(f"sweep/{index}") for index in range(2)]
    assert losses[0] != losses[1]
    lines = [line.strip() for line in ran.stdout.splitlines()]
    assert "run 2 of 2: seed=1" in lines
    assert sum(" (best)" in line for line in lines[-2:]) == 1
    table = [line.replace(" (best)", "").split()[:2] for line in lines[-2:]]
    assert table == [["seed=0", f"{losses[0][-1]:.4f}"], ["seed=1", f"{losses[1][-1]:.4f}"]]


@pytest.mark.slow
def test_interrupted_sweep_continues_with_remaining_runs(served: Command) -> None:
    overrides = ["-m", "optimizer.lr=1e-3,2e-3", "name=sweep", "strategy=single", "train.steps=2"]
    served.train(*overrides)
    (served.folder / "runs/sweep/1/summary.json").unlink()
    shutil.rmtree(served.folder / "runs/sweep/1/checkpoints", ignore_errors=True)
    reported = served.train(*overrides).stdout
    assert "run 1 of 2: optimizer.lr=0.001 (finished before)\n" in reported
    assert "run 2 of 2: optimizer.lr=0.002\n" in reported
    assert len(served.losses("sweep/1")) == 2


def test_invalid_sweep_run_is_refused_before_first(served: Command) -> None:
    ran = served.train("-m", "model.num_attention_heads=2,3,5", status=2)
    assert "model.num_attention_heads=3" in ran.stderr
    assert "model.num_attention_heads=5" in ran.stderr
    assert list(served.folder.iterdir()) == []


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model=mlp"], "model.name=mlp: needs images, but data=synthetic_tokens has tokens; use "),
        (["data.sequence_length=5000"], "data.sequence_length=5000: longer than model.max_"),
        (["model.vocab_size=100"], "model.vocab_size=100: data=synthetic_tokens has 256 tokens"),
        (["launch.backend=nccl"], "launch.backend=nccl: 2 ranks need an accelerator each"),
        (["launch.backend=mock", "train.compile=true"], "launch.backend=mock: ranks are threads"),
        (["model=llama3_8b", "data=digits"], "model=llama3_8b: needs tokens, but data=digits has"),
        (["model=llama3_70b"], "model=llama3_70b: 70.6B parameters with gradients and optimizer"),
        (["data=text", "data.files=[nothing.txt]"], "data.files=nothing.txt: no file matches"),
        (["model=custom", "model.target=nothing:build"], "model.target=nothing:build: "),
        (["data.num_samples=4"], "train.global_batch_size=8: the data has 4 samples"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_model_and_data_errors_are_reported_before_start(
    served: Command, overrides: list[str], problem: str
) -> None:
    tiny = TINY
    if overrides[0].startswith("model="):
        tiny = [word for word in TINY if not word.startswith("model.")]
    if any(word.startswith("data=") for word in overrides):
        tiny = [word for word in tiny if not word.startswith(("data=", "data."))]
    ran = served("train", *tiny, *overrides, status=2)
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"error: {problem}"), ran.stderr
    assert all(line.startswith("error: ") for line in ran.stderr.splitlines())
    assert list(served.folder.iterdir()) == []


def test_a_finished_run_is_not_trained_again_by_accident(served: Command) -> None:
    overrides = ["name=run", "strategy=single", "checkpoint.every=3"]
    served.train(*overrides)
    folder = served.folder / "runs" / "run"
    old_content = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    ran = served.train(*overrides)
    assert ran.stdout.startswith(
        "run is finished: it has trained all of its 6 steps; to continue, use"
    )
    assert json.loads(served.train(*overrides, "--json").stdout) == served.summary("run")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == old_content
    ran = served.train(*overrides, "seed=4", status=2)
    assert (
        "has already trained this number of steps with other settings than seed=4 (was 0); use more"
        in ran.stderr
    )
    ran = served.train(*overrides, "train.steps=5", status=2)
    assert "has done 6 already; use more to train on" in ran.stderr
    again = ["name=run", "strategy=single", "checkpoint.resume=never"]
    ran = served.train(*again, status=2)
    assert "already contains a run" in ran.stderr


@pytest.mark.slow
def test_run_started_from_other_checkpoint_resumes_from_its_newest(served: Command) -> None:
    begun = ["name=b", "strategy=single", "checkpoint.resume=runs/a", "checkpoint.every=2"]
    served.train("name=a", "strategy=single", "train.steps=2", "checkpoint.every=2")
    assert "resumed from runs/a/checkpoints/step_2" in served.train(*begun).stdout
    assert served.train(*begun).stdout.startswith("b is finished: ")
    longer = served.train(*begun, "train.steps=8")
    assert "b already has checkpoints: resuming from them, not from runs/a" in longer.stdout
    assert "resumed from runs/b/checkpoints/step_6" in longer.stdout
    back = "checkpoint.resume=runs/b/checkpoints/step_6"  # on purpose
    again = served.train(*begun, "train.steps=8", back)
    assert "resumed from runs/b/checkpoints/step_6" in again.stdout
    printed = " ".join(again.stdout.split())
    assert "step_8 is kept as step_8.superseded: the run went back to step 6" in printed
    assert served.train(*begun, "train.steps=8").stdout.startswith("b is finished: ")


@pytest.mark.slow
def test_reused_checkpoint_path_reports_changed_settings(
    served: Command,
) -> None:
    common = ["strategy=single", "checkpoint.path=kept", "checkpoint.every=2"]
    served.train(*common, "name=a", "train.steps=2")
    taken_up = served.train(*common, "name=b", "train.steps=4", "optimizer.lr=0.5")
    printed = " ".join(taken_up.stdout.split())
    assert "resuming with changed settings: optimizer.lr=0.5 (was 0." in printed
    assert "resumed from kept/checkpoints/step_2" in printed


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_last_save_is_completed(served: Command) -> None:
    """By the same command: evaluated, with a summary, and the same metrics as an uninterrupted
    run.
    """
    overrides = ["strategy=ddp", "launch.nproc=2", "checkpoint.every=3"]
    served.train(*overrides, "name=whole")
    served.train(*overrides, "name=killed")
    folder = served.folder / "runs" / "killed"
    (folder / "summary.json").unlink()
    last = [line for line in served.lines("killed") if "loss" in line]
    text = "".join(json.dumps(line) + "\n" for line in last)
    (folder / "metrics.jsonl").write_text(text)  # killed before it evaluated
    for _ in range(2):
        ran = served.train(*overrides, "name=killed")
        assert "done after step 6" in ran.stdout
        assert [line.get("eval_loss") for line in served.lines("killed")] == [
            line.get("eval_loss") for line in served.lines("whole")
        ]
        summary, full = served.summary("killed"), served.summary("whole")
        for key in ("status", "steps", "loss", "eval_loss"):
            assert summary[key] == full[key], key
        (folder / "summary.json").unlink()  # once more: no duplicate line
    served.train(*overrides, "name=killed", "train.steps=8")
    assert served.summary("killed")["steps"] == 8


def test_a_taken_port_is_reported_before_a_rank_starts(served: Command) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = served.train(f"launch.master_port={port}", status=2)
    assert f"launch.master_port={port}: can't listen on it (Address already in use)" in ran.stderr


def test_single_node_run_listens_only_on_loopback(served: Command, faulty: list[str]) -> None:
    overrides = [*faulty, "name=run", "train.steps=2"]
    process = served.start("train", *overrides, "model.arguments={pause:1.0}")
    metrics = served.folder / "runs" / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and bool(metrics.read_text()))
    listening = _listening(served.processes())
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert listening
    assert all(address == "0100007F" for address in listening), listening


def _listening(processes: list[int]) -> list[str]:
    """Return the addresses, in the kernel's hexadecimal, on which processes listen for TCP."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:
                continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                addresses.append(columns[1].split(":")[0])
    return addresses


def test_a_named_model_of_a_plugin_trains(served: Command, faulty: list[str]) -> None:
    served("train", *faulty, "name=run", "strategy=fsdp")
    assert served.summary("run")["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [["strategy=fsdp"], ["strategy=tensor", "train.activation_checkpointing=full"]]
)
def test_compiled_blocks_have_the_same_losses(served: Command, layout: list[str]) -> None:
    overrides = [
        *layout,
        "model.num_hidden_layers=1",
        "train.steps=3",
        "train.eval_batches=0",
    ]
    served.train("name=plain", *overrides)
    served.train("name=compiled", *overrides, "train.compile=true")
    assert served.losses("compiled") == pytest.approx(served.losses("plain"), rel=1e-5)
    # On a CPU, kernels' allocations can't be measured.
    assert served.summary("compiled")["measured_peak_bytes"] is None


def test_json_output_excludes_prints_of_user_module(served: Command) -> None:
    (served.folder / "chatty.py").write_text(
        "from torch import nn\n"
        "print('imported')\n"
        "def build():\n"
        "    print('built')\n"
        "    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
    )
    overrides = ["model=custom", "model.target=chatty:build", "plugins=[chatty]", "train.steps=1"]
    tiny = [word for word in TINY if not word.startswith("model.")]
    ran = served("train", *tiny, *overrides, "--json")
    assert json.loads(ran.stdout)["status"] == "done"


def test_prints_of_user_module_in_estimate_are_hidden(
    served: Command,
) -> None:
    (served.folder / "loud.py").write_text(
        "from torch import nn\n"
        "class Loud(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        print('forward', flush=True)\n"
        "        return super().forward(x)\n"
        "def build():\n"
        "    return Loud(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
    )
    overrides = ["model=custom", "model.target=loud:build", "strategy=single", "train.steps=3"]
    overrides.append("estimate.background=true")
    tiny = [word for word in TINY if not word.startswith("model.")]
    ran = served("train", *tiny, *overrides, "train.eval_batches=0")
    assert ran.stdout.splitlines().count("forward") == 3
    assert "forward" not in ran.stderr


@pytest.mark.slow
def test_file_named_torch_in_working_folder_is_not_imported(axonlaunch: Command) -> None:
    (axonlaunch.folder / "torch.py").write_text("raise SystemExit('imported in place of torch')")
    installed = Path(sys.executable).with_name("axonlaunch")
    ran = subprocess.run(
        [installed, "train", *TINY, "train.steps=1"],
        cwd=axonlaunch.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_closed_output_pipe_does_not_end_run(axonlaunch: Command) -> None:
    overrides = ["train", *TINY, "name=run", "checkpoint.every=6"]
    with axonlaunch.start(*overrides) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in errors
    assert axonlaunch.summary("run")["status"] == "done"
    assert (axonlaunch.folder / "runs/run/checkpoints/step_6").is_dir()


@pytest.mark.slow
def test_shortest_run_reports_measured_and_estimated_memory(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(served.folder / "cache"))
    served.train("strategy=fsdp", "name=new", "train.steps=2", "estimate.background=true")
    summary = served.summary("new")
    # The trainer keeps the last step's numbers, and each row of a batch has one more token. A
    # gathered block stays allocated until gloo's thread releases it late.
    gathered = 55_000
    assert 0 <= summary["measured_peak_bytes"] - summary["predicted_peak_bytes"] < gathered
