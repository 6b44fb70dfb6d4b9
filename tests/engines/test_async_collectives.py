"""Matrix products that overlap with communication in a tensor-parallel block compiled by torch.

The graphs are Inductor's inputs; its pass is run on copies of them. Without a GPU the fused
products themselves can't be run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import run_config
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch.comm import Backend, ProcessGroup, autograd
from axonlaunch.config import ConfigError
from axonlaunch.engines.tensor import async_collectives
from axonlaunch.engines.tensor.parallelize import parallelize
from axonlaunch.models.build import construct, spec_for

TENSOR = ["strategy.tensor.degree=2", "launch.nproc=2", "model=llama_debug"]
ASYNC = [
    *(*TENSOR, "strategy.tensor.sequence_parallel=true", "train.compile=true"),
    *("strategy.tensor.async_collectives=true", "data=synthetic_tokens", "data.sequence_length=64"),
]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """Return a group of two ranks on NCCL, seen from rank 0; nothing is communicated."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(autograd, "_fusible", set())
    from torch._inductor import config

    compiler: Any = config
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        group = ProcessGroup.from_torch(mesh.get_group("tp"))
        group.backend = Backend.NCCL
        with compiler.patch(_micro_pipeline_tp=False):
            yield group
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo reads things that torch warns about
@pytest.mark.parametrize("samples", [1, 2])
def test_compiler_overlaps_tensor_parallel_communication(
    group: ProcessGroup, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These imports take a second in every worker.
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    enabled: set[str] = set()
    monkeypatch.setattr(_symmetric_memory, "enable_symm_mem_for_group", enabled.add)
    async_collectives.overlap_exchanges(group)
    assert torch._inductor.config._micro_pipeline_tp
    graphs: list[list[str]] = []

    def compiled(graph: Any, inputs: Any) -> Any:
        copied = copy.deepcopy(graph)
        for node in copied.graph.nodes:  # as Inductor does before
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        with _symmetric_memory._test_mode(group_names=enabled):
            micro_pipeline_tp_pass(copied.graph)
        graphs.append([str(node.target) for node in copied.graph.nodes])
        return make_boxed_func(graph.forward)

    chosen = run_config([*TENSOR, "model.num_hidden_layers=1"])
    model, spec = construct(chosen, seed=0), spec_for(chosen)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(model, spec.plan(model), mesh=mesh, sequence_parallel=True)
    model.to_empty(device="cpu")
    [block] = spec.blocks(model).values()
    block.forward = torch.compile(
        block.forward,
        backend=aot_autograd(
            fw_compiler=compiled,
            bw_compiler=compiled,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        ),
    )
    model(torch.zeros(samples, 64, dtype=torch.int64)).sum().backward()
    forward, backward = graphs
    # Attention and feed-forward: each gathers its input and reduce-scatters its output.
    assert forward.count("symm_mem.fused_all_gather_matmul.default") == 2
    assert forward.count("symm_mem.fused_matmul_reduce_scatter.default") == 2
    assert not any("_c10d_functional" in target for target in forward)
    # An input's gradient is the sum of several products, which torch does not fuse.
    assert backward.count("symm_mem.fused_all_gather_matmul.default") == 2
    assert backward.count("_c10d_functional.reduce_scatter_tensor.default") == 2


def test_symmetric_memory_is_enabled_for_group(group: ProcessGroup) -> None:
    """torch 2.13 warns of the function, but its compiler still reads the setting."""
    name = group.torch_group.group_name
    noted: list[Any] = []
    memory: Any = _symmetric_memory._SymmetricMemory
    original, memory.set_group_info = memory.set_group_info, lambda *about: noted.append(about)
    try:
        async_collectives.overlap_exchanges(group)
        assert _symmetric_memory.is_symm_mem_enabled_for_group(name)
        assert [about[:3] for about in noted] == [(name, 0, 2)]
    finally:
        memory.set_group_info = original
        _symmetric_memory._group_name_to_store.pop(name, None)


def test_estimate_does_not_change_compiler_settings(group: ProcessGroup) -> None:
    group.backend = Backend.MOCK
    async_collectives.overlap_exchanges(group)
    assert not torch._inductor.config._micro_pipeline_tp


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*TENSOR, "strategy.tensor.async_collectives=true"],
            "strategy.tensor.async_collectives=true: it overlaps collectives on split "
            "sequences in compiled blocks; add strategy.tensor.sequence_parallel=true "
            "train.compile=true, or remove this setting",
        ),
        (
            ASYNC,
            "strategy.tensor.async_collectives=true: requires that all 2 tensor ranks are on GPUs "
            "of one node, because they exchange data through GPU memory; use false",
        ),
    ],
)
def test_async_tensor_parallelism_without_tensor_axis_is_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config(overrides)
    assert str(refused.value) == message
