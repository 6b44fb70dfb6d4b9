"""The private names of torch that the mock world uses.

A failure here means that torch has moved one. The fix belongs in ``comm/mock/torch_internals.py``
(how threads get separate copies of torch.distributed) or in ``group.py`` next to it (the wire names
of a group); then raise the upper bound on torch in ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import axonlaunch.comm
from axonlaunch.comm import World
from axonlaunch.comm.mock.process_group import MockProcessGroup
from axonlaunch.comm.mock.torch_internals import (
    WorldOfThread,
    isolated_threads,
    threads_are_isolated,
)


@pytest.mark.parametrize(
    "name",
    [
        "_set_thread_isolation_mode",
        "_register_process_group",
        "_resolve_process_group",
        "_unregister_process_group",
    ],
)
def test_torch_cpp_private_names_exist(name: str) -> None:
    assert hasattr(torch._C._distributed_c10d, name)


@pytest.mark.parametrize("name", ["_world", "_update_default_pg"])
def test_torch_python_private_names_exist(name: str) -> None:
    assert hasattr(distributed_c10d, name)


@pytest.mark.parametrize(
    "name", ["_ensureCUDADeviceGuardSet", "_clear_DTensor_sharding_propagator_cache"]
)
def test_torch_private_names_of_mock_exist(name: str) -> None:
    assert hasattr(torch._C, name)


def test_thread_world_has_all_fields_of_torch_world() -> None:
    ours = vars(WorldOfThread())
    fields_of_torch = {
        name
        for name, member in inspect.getmembers(type(distributed_c10d._world))
        if isinstance(member, property)
    }
    derived = {"pg_config_info"}  # derived from the others, by torch's flight recorder
    assert fields_of_torch - derived <= set(ours)


def test_thread_isolation_mode_is_restored() -> None:
    assert not threads_are_isolated()
    with isolated_threads():
        assert threads_are_isolated()
        with isolated_threads():
            assert threads_are_isolated()
        assert threads_are_isolated()
    assert not threads_are_isolated()


def test_ddp_active_module_is_not_kept_after_switch() -> None:
    def run(world: World) -> None:
        class Waiting(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                dist.barrier()  # here the next rank runs
                return super().forward(inputs)

        DistributedDataParallel(Waiting(1, 1))(torch.ones(1, 1))

    World.mock(3).run(run)
    assert DistributedDataParallel._active_ddp_module is None


def test_mock_group_implements_every_torch_collective() -> None:
    not_ours = {
        "boxed",  # the C++ object itself
        "unbox",
        "bound_device_id",
        "group_desc",
        "get_group_store",
        "merge_remote_group",  # gloo lacks these
        "split_group",
        "monitored_barrier",
        "name",
        "rank",
        "size",
        "set_timeout",
        "use_pg_for_symm_mem_rendezvous",
    }
    public = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")}
    constants = {name for name in public if name.isupper() or name == "BackendType"}
    assert public - constants - not_ours <= set(vars(MockProcessGroup))


def test_torchs_private_modules_are_imported_in_one_file_only() -> None:
    folder = Path(axonlaunch.comm.__file__).parent
    private = {
        path.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"_C", "_distributed_c10d", "_world"}
    }
    assert private == {"torch_internals.py"}
