"""A launcher's variables are either read completely or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axonlaunch.config import compose
from axonlaunch.launch.environment import environment_variables
from axonlaunch.launch.environment.cluster_environment import (
    ClusterEnvironment,
    apply_to_config,
)
from axonlaunch.launch.environment.environment_variables import submission_of
from axonlaunch.launch.environment.variable_reader import first_host

BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prte-7@1",
}
SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "localhost,gpu[07-08]",
}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    "SKYPILOT_TASK_ID": "sky-2026-11-28_job_0",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_GPUS_PER_NODE": "4",
    "DSTACK_RUN_ID": "b7c4",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1"}


def found(variables: dict[str, str]) -> ClusterEnvironment:
    environment = ClusterEnvironment.detect(variables)
    assert not environment.problems
    return environment


def problems(variables: dict[str, str]) -> list[str]:
    environment = ClusterEnvironment.detect(variables)
    assert not environment.launcher
    return [str(problem) for problem in environment.problems]


def test_environment_without_launcher_has_no_world() -> None:
    assert ClusterEnvironment.detect({"PATH": "/bin"}) == ClusterEnvironment()


def test_without_local_rank_a_process_starts_its_nodes_ranks() -> None:
    env = found(BY_HAND)
    assert (env.rank, env.world_size, env.local_rank) == (4, 8, None)
    assert (env.master_addr, env.master_port) == ("10.0.0.1", 29500)


def test_with_local_rank_a_process_is_one_rank() -> None:
    env = found({**BY_HAND, "LOCAL_RANK": "0"})
    assert (env.rank, env.local_rank, env.launcher) == (4, 0, "the environment")


def test_torchrun_attempts_have_separate_store_keys() -> None:
    torchrun = {
        **BY_HAND,
        "LOCAL_RANK": "0",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    env = found(torchrun)
    assert (env.launcher, env.run_id, env.agent_hosts_store) == ("torchrun", "job/2", True)


def test_mpirun_on_one_node_needs_no_address() -> None:
    env = found(OPEN_MPI)
    assert (env.rank, env.local_rank, env.local_world_size) == (3, 3, 4)
    assert env.master_addr == "127.0.0.1"
    again = found({**OPEN_MPI, "PMIX_NAMESPACE": "prte-8@1"})
    assert again.master_port != env.master_port  # two jobs use different ports


def test_mpirun_over_nodes_needs_address_of_rank_0() -> None:
    over = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert "mpirun -x MASTER_ADDR" in problems(over)[0]
    assert found({**over, "MASTER_ADDR": "node1"}).master_addr == "node1"


def test_srun_variables_describe_full_world() -> None:
    env = found(SLURM)
    assert (env.rank, env.local_rank, env.local_world_size) == (3, 1, 2)
    assert (env.nnodes, env.node_rank, env.master_addr) == (2, 1, "localhost")
    assert env.run_id == "41.0"


def test_batch_script_and_single_task_step_are_not_worlds() -> None:
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert found(batch) == ClusterEnvironment()
    one_task = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert found(one_task) == ClusterEnvironment()


def test_variables_set_by_hand_inside_a_slurm_step_come_first() -> None:
    assert found({**SLURM, **BY_HAND, "LOCAL_RANK": "0"}).launcher == "the environment"


@pytest.mark.parametrize(
    ("variables", "reported"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            [
                "MASTER_ADDR: is not set, but RANK, WORLD_SIZE are; set it, or write launch=local",
                "MASTER_PORT: is not set, but RANK, WORLD_SIZE are; set it, or write launch=local",
            ],
        ),
        (
            {"MASTER_ADDR": "10.0.0.1"},
            [
                "RANK: is not set, but MASTER_ADDR is; set it, or write launch=local",
                "WORLD_SIZE: is not set, but MASTER_ADDR is; set it, or write launch=local",
                "MASTER_PORT: is not set, but MASTER_ADDR is; set it, or write launch=local",
            ],
        ),
        ({**BY_HAND, "RANK": "8"}, ["RANK=8: expected a number below 8"]),
        (
            {**BY_HAND, "RANK": "-1", "MASTER_PORT": "port", "WORLD_SIZE": "0"},
            [
                "WORLD_SIZE=0: expected a whole number from 1",
                "RANK=-1: expected a whole number from 0",
                "MASTER_PORT=port: expected a whole number from 1",
            ],
        ),
        (
            {**BY_HAND, "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"},
            ["LOCAL_RANK=4: expected a number below 4"],
        ),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9: is more than WORLD_SIZE=8"]),
        (
            {"PMI_RANK": "1"},
            [
                "PMI_SIZE: is not set, but PMI_RANK is",
                "MPI_LOCALRANKID: is not set, but PMI_RANK is",
                "MASTER_ADDR: is not set, and mpirun does not say where rank 0 is; "
                "pass it, as in mpirun -x MASTER_ADDR=10.0.0.1",
            ],
        ),
    ],
)
def test_incomplete_world_variables_are_all_reported(
    variables: dict[str, str], reported: list[str]
) -> None:
    assert problems(variables) == reported


def settled(
    variables: dict[str, str], accelerators: int = 0, **launch: Any
) -> tuple[dict[str, Any], list[str]]:
    tree: dict[str, Any] = {"launch": launch}
    problems = apply_to_config(tree, found(variables), accelerators=lambda: accelerators)
    return tree["launch"], [str(problem) for problem in problems]


def test_the_second_of_two_nodes_is_found_by_its_first_rank() -> None:
    launch, problems = settled(BY_HAND, nproc=4)
    assert not problems
    assert (launch["nnodes"], launch["node_rank"], launch["nproc"]) == (2, 1, 4)


@pytest.mark.parametrize("sizes", [{"nnodes": 2}, {"nproc": 4}])
def test_nodes_or_ranks_on_each_are_enough(sizes: dict[str, int]) -> None:
    launch, problems = settled(BY_HAND, **sizes)
    assert not problems
    assert (launch["nnodes"], launch["nproc"]) == (2, 4)


def test_accelerators_say_how_many_ranks_a_node_has() -> None:
    launch, problems = settled(BY_HAND, accelerators=4)
    assert not problems
    assert launch["nproc"] == 4


def test_missing_world_settings_are_required() -> None:
    _, problems = settled(BY_HAND)
    assert problems == [
        "launch.nproc=auto: the run has WORLD_SIZE=8 ranks, and nothing says how many of them run "
        "on this node; write the number, or launch.nnodes"
    ]


def test_numbers_that_contradict_each_other_are_all_reported() -> None:
    _, problems = settled(BY_HAND, nproc=4, nnodes=3, node_rank=0, master_addr="10.0.0.9")
    leave = "remove this setting, or start without these variables"
    assert problems == [
        f"launch.nnodes=3: the environment says 2; {leave}",
        f"launch.node_rank=0: the environment says 1; {leave}",
        f"launch.master_addr=10.0.0.9: the environment says 10.0.0.1; {leave}",
    ]


def test_world_size_must_be_multiple_of_ranks_per_node() -> None:
    _, problems = settled(BY_HAND, nproc=3)
    assert problems == [
        "launch.nproc=3: WORLD_SIZE=8 ranks are not a multiple of 3 ranks per node; "
        "use 1, 2, 4 or 8"
    ]


def test_a_first_rank_inside_another_node_is_refused() -> None:
    _, problems = settled({**BY_HAND, "RANK": "2"}, nproc=4)
    assert problems == ["launch.nproc=4: RANK=2 is not the first rank of a node with 4"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[07-08]", "gpu07"),
        ("gpu[3,5-9],login", "gpu3"),
        ("a[1-2]-ib,b3", "a1-ib"),
        ("x,y", "x"),
    ],
)
def test_master_address_is_first_slurm_node(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_launcher_variable_is_recorded_as_origin() -> None:
    composed = compose(["launch.nproc=2"])
    origins = found(OPEN_MPI).applied_to(composed, accelerators=lambda: 0).origins()
    assert origins["launch.master_addr"] == origins["launch.nproc"] == "environment (mpirun)"
    assert origins["launch.name"] == "launch/auto.yaml"


@pytest.mark.parametrize(
    ("variables", "address"),
    [(TRAINER, "job-node-0-0.job"), (SKYPILOT, "10.0.0.1"), (DSTACK, "10.0.0.1")],
)
def test_process_of_each_node_starts_its_ranks(variables: dict[str, str], address: str) -> None:
    launch, problems = settled(variables, accelerators=4)
    assert not problems
    assert (launch["nnodes"], launch["node_rank"], launch["nproc"]) == (2, 1, 4)
    assert launch["master_addr"] == address
    assert found(variables).local_rank is None


def test_skypilot_and_dstack_nodes_derive_the_same_port_from_their_run() -> None:
    port = found(SKYPILOT).master_port
    assert found({**SKYPILOT, "SKYPILOT_NODE_RANK": "0"}).master_port == port
    assert found({**SKYPILOT, "SKYPILOT_TASK_ID": "sky-other"}).master_port != port
    assert found({**DSTACK, "MASTER_PORT": "4000"}).master_port == 4000


@pytest.mark.parametrize("number", ["auto", "gpu"])
def test_trainer_without_number_of_ranks_starts_one_for_each_gpu(number: str) -> None:
    launch, problems = settled({**TRAINER, "PET_NPROC_PER_NODE": number}, accelerators=8)
    assert (launch["nproc"], problems) == (8, [])
    _, problems = settled({**TRAINER, "PET_NPROC_PER_NODE": number}, nproc="auto")
    assert problems == [
        "launch.nproc=auto: is required without accelerators; Kubeflow Trainer sets no number of "
        "ranks"
    ]


def test_configured_number_of_ranks_that_trainer_contradicts_is_refused() -> None:
    _, problems = settled(TRAINER, nproc=8)
    assert problems == [
        "launch.nproc=8: Kubeflow Trainer says 4; remove this setting, or start without "
        "Kubeflow Trainer"
    ]


def test_configured_number_of_nodes_leaves_all_gpus_of_each_node_to_its_ranks() -> None:
    launch, problems = settled(SKYPILOT, accelerators=4, nnodes=2)
    assert (launch["nnodes"], launch["nproc"], problems) == (2, 4, [])


@pytest.mark.parametrize(
    ("variables", "tool"), [(SKYPILOT, "SkyPilot"), (DSTACK, "dstack")], ids=["sky", "dstack"]
)
def test_number_of_ranks_that_contradicts_the_gpus_of_each_node_is_refused(
    variables: dict[str, str], tool: str
) -> None:
    _, problems = settled(variables, nproc=8)
    assert problems == [
        f"launch.nproc=8: {tool} says 4; remove this setting, or start without {tool}"
    ]
    assert settled(variables, nproc=8, device="cpu")[0]["nproc"] == 8
    assert settled(variables, nproc=8, backend="gloo")[1] == []
    name = next(name for name in variables if "GPUS" in name)
    assert settled({**variables, name: "0"}, nproc=8)[1] == []
    single = {**variables, f"{name.partition('_')[0]}_NODE_RANK": "0"}
    single |= {key: "1" for key in variables if key.endswith(("NODES", "NODES_NUM"))}
    single |= {key: "10.0.0.1" for key in variables if "IP" in key}
    assert found(single) == ClusterEnvironment()  # a shell on a node: it may use some of its GPUs


def test_single_node_of_trainer_starts_its_ranks_as_on_a_laptop() -> None:
    one = {**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0"}
    launch, problems = settled(one)
    assert (launch["nnodes"], launch["nproc"], problems) == (1, 4, [])
    assert "master_addr" not in launch
    assert found({**one, "PET_NPROC_PER_NODE": "auto"}) == ClusterEnvironment()


def applied(variables: dict[str, str], *overrides: str) -> tuple[dict[str, Any], list[str]]:
    composed = found(variables).applied_to(compose(list(overrides)), accelerators=lambda: 0)
    return composed.tree["launch"], [str(problem) for problem in composed.problems]


def test_index_of_a_job_is_the_rank_of_a_node() -> None:
    nodes = ["launch.nnodes=2", "launch.nproc=2", "launch.master_addr=job-0.job"]
    launch, problems = applied(INDEXED_JOB, *nodes)
    assert (launch["node_rank"], launch["master_addr"], problems) == (1, "job-0.job", [])
    launch, problems = applied({**INDEXED_JOB, "MASTER_ADDR": "job-0.job"}, *nodes[:2])
    assert (launch["master_addr"], problems) == ("job-0.job", [])
    _, problems = applied(INDEXED_JOB, *nodes, "launch.node_rank=0")
    assert problems == [
        "launch.node_rank=0: JOB_COMPLETION_INDEX says 1; remove this setting, or start without "
        "JOB_COMPLETION_INDEX"
    ]


def test_pods_of_an_indexed_job_with_one_node_each_are_separate_runs() -> None:
    launch, problems = applied(INDEXED_JOB, "launch.nproc=2")
    assert ("node_rank" in launch, problems) == (False, [])


@pytest.mark.parametrize(
    ("variables", "reported"),
    [
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-node-0-0.job"},
            [
                "PET_MASTER_PORT: is not set, but PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR are; "
                "set it, or write launch=local"
            ],
        ),
        (
            {"SKYPILOT_NODE_RANK": "1"},
            [
                "SKYPILOT_NUM_NODES: is not set, but SKYPILOT_NODE_RANK is; set it, or write "
                "launch=local",
                "SKYPILOT_NODE_IPS: is not set, but SKYPILOT_NODE_RANK is; set it, or write "
                "launch=local",
            ],
        ),
        (
            {**TRAINER, "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "all"},
            [
                "PET_NODE_RANK=2: expected a number below 2",
                "PET_NPROC_PER_NODE=all: expected a whole number from 1",
            ],
        ),
        (
            {**TRAINER, "PET_NNODES": "2:4"},
            ["PET_NNODES=2:4: expected a whole number from 1"],
        ),
        (
            {**SKYPILOT, "SKYPILOT_NUM_NODES": "3"},
            ["SKYPILOT_NODE_IPS: has 2 addresses, but SKYPILOT_NUM_NODES=3"],
        ),
        (
            {**TRAINER, "JOB_COMPLETION_INDEX": "0"},
            [
                "JOB_COMPLETION_INDEX=0: but PET_NODE_RANK=1; they describe the same node: unset "
                "one of them"
            ],
        ),
        (
            {**DSTACK, **SKYPILOT, "SKYPILOT_NODE_RANK": "0"},
            [
                "DSTACK_NODE_RANK=1: but SKYPILOT_NODE_RANK=0; they describe the same node: unset "
                "one of them"
            ],
        ),
        (
            {"JOB_COMPLETION_INDEX": "first"},
            ["JOB_COMPLETION_INDEX=first: expected a whole number from 0"],
        ),
    ],
)
def test_incomplete_or_contradictory_node_variables_are_refused(
    variables: dict[str, str], reported: list[str]
) -> None:
    assert problems(variables) == reported


def test_starts_of_a_run_by_its_scheduler_have_one_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any node; the first node may be replaced."""
    monkeypatch.setattr(environment_variables, "POD_SUBMISSION", str(tmp_path / "submission"))
    again = {"SLURM_RESTART_COUNT": "1", "SLURM_CLUSTER_NAME": "big"}
    named = submission_of({**SLURM, "SLURM_CLUSTER_NAME": "big"})
    assert submission_of({**SLURM, **again, "SLURM_NODEID": "0"}) == named != ""
    assert submission_of({**SLURM, "SLURM_CLUSTER_NAME": "other"}) != named
    for variables in (SKYPILOT, DSTACK):
        run = next(name for name in variables if name.endswith(("TASK_ID", "RUN_ID")))
        assert variables[run] in submission_of(variables)
    assert submission_of({"AXONLAUNCH_SUBMISSION": "5f"}) == "AXONLAUNCH_SUBMISSION 5f"
    assert submission_of({"JOB_COMPLETION_INDEX": "0"}) == ""
    (tmp_path / "submission").write_text("c0ffee")
    assert submission_of({"JOB_COMPLETION_INDEX": "0"}) == "pods c0ffee"
