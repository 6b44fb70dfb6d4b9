"""The private names of torch: which file of a folder stands on them, and that torch has them.

A failure of ``test_torch_still_has`` means that torch has moved a name. The fix belongs in the file
that it says; then raise the upper bound on torch in ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import axonlaunch

PACKAGE = Path(axonlaunch.__file__).parent
INTERNALS = {
    "checkpoint/torch_internals.py",
    "comm/mock/torch_internals.py",
    "comm/torch_internals.py",
    "engines/context/ring_attention.py",
    "engines/data_parallel/torch_internals.py",
    "engines/pipeline/named_stage.py",
    "engines/precision/policy.py",
    "engines/tensor/torch_internals.py",
    "launch/multinode/torch_internals.py",
    "models/torch_internals.py",
    "planning/tracing/fake_inductor.py",  # the compiler
    "planning/tracing/fake_world.py",  # and what ranks do to each other
    "training/profiling.py",
}
"""Where private names of torch may be: one file of a folder, or one of each of its parts."""
DOCUMENTED = (
    "torch.ops.",  # operations by their names
    "torch._foreach_",
    "torch._dynamo.config.",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_",
    "torch._subclasses.fake_tensor.FakeTensor",
)
"""Names that torch's own pages tell to use, for all that they begin with a line."""


def _uses(path: Path) -> Iterator[str]:
    """Yield the names of torch that a file imports or reads from a module of torch."""
    tree = ast.parse(path.read_text())
    known = _names_of_torch(tree)
    yield from known.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, known)):
            yield name


def _names_of_torch(tree: ast.Module) -> dict[str, str]:
    """Return what a file calls torch's modules and what is in them, with their whole names."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            known |= {
                each.asname or each.name: each.name
                for each in node.names
                if each.name.split(".")[0] == "torch"
            }
    known |= {"torch": "torch"} if known else {}
    for node in ast.walk(tree):  # _cpp: Any = torch._C._distributed_c10d
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (name := _dotted(node.value, known)):
                known.setdefault(target.id, name)
    return known


def _dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *reversed(names)])


def _is_private(name: str) -> bool:
    parts = [part for part in name.split(".") if part.startswith("_") and not part.endswith("__")]
    return bool(parts) and not name.startswith(DOCUMENTED)


FOUND = {
    (str(path.relative_to(PACKAGE)), name)
    for path in PACKAGE.rglob("*.py")
    for name in _uses(path)
    if _is_private(name)
}
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
    (nn.parallel.DistributedDataParallel, "_check_reducer_finalized"),
]
"""What torch's objects have, whose names say nothing of torch."""
OF_OTHERS = {
    "config/hydra_files.py": "Hydra",
    "models/hf/library.py": "transformers",
    "system/forkserver.py": "multiprocessing",
}
DOCUMENTED_OF_OBJECTS = {
    *("_exit", "_current_frames"),  # Python's os and sys
    *("_parameters", "_modules", "_version", "_schema", "_step_supports_amp_scaling"),  # torch
    *("_init_weights", "_no_split_modules"),  # transformers: what whoever writes a model defines
}


def test_private_names_of_torch_are_in_one_file_of_a_folder() -> None:
    assert {path for path, _ in FOUND} <= INTERNALS


def test_so_are_those_of_objects_of_whatever_class() -> None:
    """Those that nothing of ours defines; whose object it is, the text alone does not say."""
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    ours = {name for tree in trees.values() for name in _defined(tree)}
    elsewhere = {
        (path, name)
        for path, tree in trees.items()
        if path not in {*INTERNALS, *OF_OTHERS}
        for name in _read_of_objects(tree) - ours - DOCUMENTED_OF_OBJECTS
    }
    assert not elsewhere


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def _read_of_objects(tree: ast.Module) -> set[str]:
    """Return private attributes, also by getattr, of all but what is a module of torch."""
    known = _names_of_torch(tree)
    nodes = [*ast.walk(tree)]
    named = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and not _dotted(node, known)
    }
    asked = {
        node.args[1].value
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}
        if isinstance(node.args[1], ast.Constant)
    }
    return {name for name in named | asked if name[0] == "_" and not name.endswith("__")}


@pytest.mark.parametrize(("path", "name"), sorted(FOUND))
def test_torch_still_has(path: str, name: str) -> None:
    module, attributes = "torch", name.split(".")[1:]
    holder: Any = torch
    for attribute in attributes:
        module = f"{module}.{attribute}"
        if not hasattr(holder, attribute):
            importlib.import_module(module)
        holder = getattr(holder, attribute)


@pytest.mark.parametrize(("holder", "attribute"), OF_OBJECTS, ids=lambda value: str(value)[:40])
def test_an_object_of_torch_still_has(holder: Any, attribute: str) -> None:
    assert hasattr(holder, attribute)
