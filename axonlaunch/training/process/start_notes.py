"""Notes at the start of a run on settings that have little effect or probably were not intended."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from axonlaunch.comm import Backend, World
from axonlaunch.config import RunConfig, to_tree
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.optimization.training_defaults import note_on_defaults
from axonlaunch.config.precision import PRECISIONS, Float8Format
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.scaled_layers import note_on_experts
from axonlaunch.system import gpus


def settings_notes(config: RunConfig, world: World) -> tuple[str, ...]:
    """Return notes on settings that have no or little effect on this device or in this world."""
    notes = [note] if (note := note_on_defaults(to_tree(config))) else []
    strategy = config.strategy
    layout = Layout.of(config, world_size=world.world_size)
    is_hybrid = layout.facts.shards_parameters and strategy.fsdp.sharding == "hybrid_shard"
    if is_hybrid and layout.dp_replicate == 1:
        notes.append(
            "strategy.fsdp.sharding=hybrid_shard: there is one replica, as with full_shard; "
            "strategy.fsdp.replicate=2 creates two"
        )
    notes += device_notes(world)
    offload = strategy.fsdp.cpu_offload
    if offload != "none" and world.device.type == "cpu":
        notes.append(
            f"strategy.fsdp.cpu_offload={offload}: the device is the CPU, "
            "so offloaded tensors are in host memory anyway"
        )
    if config.train.profile.memory and world.device.type == "cpu":
        notes.append(
            "train.profile.memory=true: the device is the CPU, which has no allocator history to "
            "record"
        )
    if PRECISIONS[config.train.precision].compute.is_low and world.device.type == "cpu":
        notes.append(
            f"train.precision={config.train.precision}: many CPUs have no native arithmetic for "
            "it, so it may be slower than fp32"
        )
    products = precision_of(config).products
    if world.is_main and (products is not None or config.train.compile):  # only its notes are shown
        spec, model = spec_for(config), on_meta(config, seed=config.seed)
        if products is not None and (left_out := note_on_experts(config, spec, model)):
            notes.append(left_out)
        if config.train.compile and spec.most_experts(model):
            notes.append(
                "train.compile=true: compiled blocks don't count the tokens of experts, so there "
                "is no expert_load, and no note on routers that collapse"
            )
    if isinstance(products, Float8Format) and world.device.type == "cpu":
        notes.append(
            f"train.matmul_dtype={products.name}: the CPU multiplies numbers in 8 bits as numbers "
            "of 32, to the same results, but slower than without this setting"
        )
    elif products is not None and world.device.type != "cpu" and not config.train.compile:
        notes.append(
            f"train.matmul_dtype={products.name}: products of rounded numbers are slower than "
            "others unless they are rounded in compiled kernels; use train.compile=true"
        )
    return (*notes, *arithmetic_notes(config.train, world.device))


def arithmetic_notes(train: TrainConfig, device: torch.device) -> Iterator[str]:
    """Yield a note if matrix products are in full fp32 on a GPU with a faster arithmetic.

    Full fp32 is the default of ``train.precision`` and ``train.matmul_precision``.

    Source: NVIDIA, "A100 Tensor Core GPU Architecture", 2020: TF32 from compute capability 8.0 on.
    """
    is_full = not PRECISIONS[train.precision].compute.is_low
    is_default = is_full and train.matmul_precision == "highest"
    if not is_default or device.type != "cuda" or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability(device) >= (8, 0):
        yield (
            "train.precision=fp32: matrix products run without tensor cores; "
            "train.matmul_precision=high computes them in TF32, train.precision=bf16 in bf16"
        )


def device_notes(world: World) -> Iterator[str]:
    """Yield a note if the run is on the CPU although there are devices, or if ranks share one."""
    if world.device.type == "cpu" and (devices := gpus.device_count()):
        yield (
            f"launch.device=cpu: the ranks compute on the CPU, although rank 0 sees {devices} "
            f"{'device' if devices == 1 else 'devices'}; to use one rank per device, write "
            f"launch.device=cuda launch.nproc={devices}"
        )
    if world.device.type != "cpu" and world.backend is not Backend.NCCL and world.world_size > 1:
        counted = "include all ranks" if world.backend is Backend.MOCK else "are only its own"
        yield (
            f"launch.backend={world.backend}: ranks share {world.device}, which is slow and meant "
            f"for debugging; the main rank's memory figures {counted}"
        )


def data_notes(config: RunConfig, dataset: Dataset) -> Iterator[str]:
    """Yield a note if a pretrained model is trained on bytes instead of its tokens."""
    if config.is_pretrained and dataset.is_text and dataset.info.tokenizer is None:
        yield (
            f"data={config.data.name}: its tokens are bytes, but the pretrained model has its own "
            "tokenizer; data=documents reads text with that tokenizer"
        )
