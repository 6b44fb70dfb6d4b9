"""Divided models with sharding, recomputation and the compiler."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tensor_cases import (
    GPT,
    LLAMA,
    Seen,
    assert_same_gradients,
    axis,
    in_float64,
    loss_of,
    on_ranks,
    tokens_and_targets,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import axonlaunch as ax
from axonlaunch.engines.recomputation.activation_checkpointing import apply_activation_checkpointing
from axonlaunch.engines.tensor.parallelize import parallelize
from axonlaunch.models.build import build_model, construct, initialize_weights, spec_for
from axonlaunch.models.specs.loss import cross_entropy_sum


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("config", [LLAMA, GPT])
@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
def test_fully_shard_wraps_tensor_parallel_layers(
    config: Any, sequence_parallel: bool, recomputation: Any
) -> None:
    tokens, targets = tokens_and_targets()
    undivided = in_float64(config)
    F.cross_entropy(undivided(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def rank(world: ax.World) -> None:
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        model = construct(config, seed=1).double()  # on meta
        plan = spec_for(config).plan(model)
        parallelize(model, plan, mesh=root["tp"], sequence_parallel=sequence_parallel)
        apply_activation_checkpointing(model.layers, mode=recomputation)
        for layer in model.layers:
            fully_shard(layer, mesh=root["dp_shard"])
        fully_shard(model, mesh=root["dp_shard"])
        initialize_weights(model, config, seed=1, device="cpu")
        mine = root["dp_shard"].get_local_rank()
        loss = loss_of(model, root["tp"], tokens[mine, None], targets[mine, None])
        (2 * loss).backward()  # FSDP averages over its 2 ranks
        assert_same_gradients(model, undivided)

    on_ranks(4, rank)


def test_fully_shard_of_only_blocks_works() -> None:
    tokens, targets = tokens_and_targets()
    undivided = in_float64(LLAMA)
    F.cross_entropy(undivided(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def rank(world: ax.World) -> None:
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        model = in_float64(LLAMA)
        parallelize(model, spec_for(LLAMA).plan(model), mesh=root["tp"])
        for layer in model.layers:
            fully_shard(layer, mesh=root["dp_shard"])
        loss_of(model, root["tp"], tokens, targets).backward()
        assert_same_gradients(model, undivided)

    on_ranks(4, rank)


def test_recomputation_does_not_repeat_saved_collectives() -> None:
    tokens, targets = tokens_and_targets()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation.namespace == "_c10d_functional"
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def rank(world: ax.World) -> int:
        model, mesh = build_model(GPT), axis(world)
        parallelize(model, spec_for(GPT).plan(model), mesh=mesh)
        for layer in model.layers:
            inner = layer.forward
            layer.forward = lambda *inputs, inner=inner: checkpoint(
                inner,
                *inputs,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
        loss = loss_of(model, mesh, tokens, targets)
        with Seen() as watched:
            loss.backward()
        return len(watched.names)

    # 2 per block and one for the head; nothing of the forward is recomputed.
    assert on_ranks(2, rank) == [5, 5]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # dynamo reads things that torch warns about
@pytest.mark.slow
def test_blocks_compile_as_one_graph() -> None:
    tokens, targets = tokens_and_targets()
    undivided = build_model(LLAMA, seed=1)
    cross_entropy_sum(undivided(tokens), targets).backward()

    def rank(world: ax.World) -> None:
        model, mesh = build_model(LLAMA, seed=1), axis(world)
        parallelize(model, spec_for(LLAMA).plan(model), mesh=mesh, sequence_parallel=True)
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        loss_of(model, mesh, tokens, targets).backward()
        assert_same_gradients(model, undivided, rtol=1e-3, atol=1e-3)

    on_ranks(2, rank)


GLOO_RANK = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {folder!r})
sys.path.insert(0, {support!r})
import test_tensor_composition as here
import torch, axonlaunch as ax
torch.set_num_threads(1)
with ax.World.init(backend="gloo") as world:
    here.train_compiled(world)
"""


def train_compiled(world: ax.World) -> None:
    tokens, targets = tokens_and_targets()
    undivided = build_model(LLAMA, seed=1)
    cross_entropy_sum(undivided(tokens), targets).backward()
    root = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = construct(LLAMA, seed=1)
    parallelize(model, spec_for(LLAMA).plan(model), mesh=root["tp"], sequence_parallel=True)
    for layer in model.layers:
        layer.compile(fullgraph=True)
        fully_shard(layer, mesh=root["dp_shard"])
    fully_shard(model, mesh=root["dp_shard"])
    initialize_weights(model, LLAMA, seed=1, device="cpu")
    loss_of(model, root["tp"], tokens, targets).backward()
    assert_same_gradients(model, undivided, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_blocks_compile_on_gloo_with_inductor_under_fully_shard(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = GLOO_RANK.format(
        folder=str(Path(__file__).parent), support=str(Path(__file__).parent.parent)
    )
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    base |= {"LOCAL_WORLD_SIZE": "2", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
