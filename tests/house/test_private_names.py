"""Private names of torch: the only file of a folder that uses them, and that torch still has them.

A failure of ``test_torch_still_has_each`` means that torch has moved a name. The fix belongs in the
file that the message names; then raise the upper bound on torch in ``pyproject.toml``.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.package_source import sources
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

INTERNALS = {
    "checkpoint/torch_internals.py",
    "comm/mock/torch_internals.py",
    "comm/torch_internals.py",
    "engines/context/ring_attention.py",
    "engines/data_parallel/torch_internals.py",
    "engines/pipeline/named_stage.py",
    "engines/precision/torch_internals.py",
    "engines/tensor/torch_internals.py",
    "launch/local/torch_internals.py",  # the compiler, before its import
    "launch/multinode/torch_internals.py",
    "models/torch_internals.py",
    "planning/tracing/devices/fake_inductor.py",  # the compiler
    "planning/tracing/fake_world.py",  # and communication between ranks
    "training/measuring/profiling.py",
}
"""Files that may use private names of torch: one file of a folder, or one of each of its parts."""
DOCUMENTED = (
    "torch.ops.",  # operations by their names
    "torch._foreach_",
    "torch._dynamo.config.",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_",
    "torch._subclasses.fake_tensor.FakeTensor",
)
"""Names that torch's documentation recommends, although they begin with an underscore."""


def _is_private(name: str) -> bool:
    parts = [part for part in name.split(".") if part.startswith("_") and not part.endswith("__")]
    return bool(parts) and not name.startswith(DOCUMENTED)


OF_OBJECTS: list[tuple[Any, str]] = [
    (torch.UntypedStorage, "_cdata"),
    (torch.Tensor, "_is_view"),
    (torch.Tensor, "_make_subclass"),
    (torch.Tensor, "_version"),
    (DTensor, "_local_tensor"),
    (DTensor, "_spec"),
    (nn.Module(), "_parameters"),
    (nn.Module(), "_modules"),
    (torch.ops.aten.mm.default, "_schema"),
    (torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True), "_step_supports_amp_scaling"),
    (dist.ProcessGroupGloo, "_Options"),
    (dist.ProcessGroupGloo, "_set_default_timeout"),
    (dist.Reducer, "_push_all_rebuilt_params"),
    (dist.Reducer, "_rebuild_buckets"),
    (FSDPModule, "_get_fsdp_state"),
    (FSDPParam, "accumulate_unsharded_grad_if_needed"),
    (FSDPParam, "to_accumulated_grad_if_needed"),
    (FSDPParamGroup, "post_backward"),
    (nn.parallel.DistributedDataParallel, "_check_reducer_finalized"),
]
"""Private attributes of torch's objects, with names that do not mention torch."""
OF_OTHERS = {
    "config/composition/hydra_files.py": "Hydra",
    "models/hf/reading/library.py": "transformers",
    "system/processes/forkserver.py": "multiprocessing",
}
DOCUMENTED_OF_OBJECTS = {
    *("_exit", "_current_frames"),  # Python's os and sys
    *("_parameters", "_modules", "_version", "_schema", "_step_supports_amp_scaling"),  # torch
    *("_init_weights", "_no_split_modules"),  # transformers: defined by the author of a model
}


def private_names() -> set[tuple[str, str]]:
    """Return files, and the private names of torch that they import or read from a module."""
    return {(each.path, name) for each in sources() for name in each.of_torch if _is_private(name)}


def test_private_names_of_torch_are_in_one_file_of_a_folder() -> None:
    assert {path for path, _ in private_names()} <= INTERNALS


def test_so_are_those_of_objects_of_whatever_class() -> None:
    """Attributes that axonlaunch does not define; the text does not show the object's class."""
    ours = set[str]().union(*(source.defined for source in sources()))
    elsewhere = {
        (source.path, name)
        for source in sources()
        if source.path not in {*INTERNALS, *OF_OTHERS}
        for name in source.attributes - ours - DOCUMENTED_OF_OBJECTS
        if name.startswith("_") and not name.endswith("__")
    }
    assert not elsewhere


def test_torch_still_has_each() -> None:
    missing = {(path, name) for path, name in private_names() if not _exists(name)}
    assert not missing


def _exists(name: str) -> bool:
    module, *attributes = name.split(".")
    holder: Any = importlib.import_module(module)
    for attribute in attributes:
        module = f"{module}.{attribute}"
        if not hasattr(holder, attribute):
            with suppress(ImportError):
                importlib.import_module(module)
        if not hasattr(holder, attribute):
            return False
        holder = getattr(holder, attribute)
    return True


@pytest.mark.parametrize(("holder", "attribute"), OF_OBJECTS, ids=lambda value: str(value)[:40])
def test_an_object_of_torch_still_has(holder: Any, attribute: str) -> None:
    assert hasattr(holder, attribute)
