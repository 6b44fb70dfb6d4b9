"""Activation checkpointing: recomputes activations of blocks in backward instead of saving them.

The forward of each block is replaced in place; parameter names do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from axonlaunch.engines.expert.kept_choices import keep_choices
from axonlaunch.models.torch_internals import Dropout

_KNOWN = ("torch.nn.modules.", "axonlaunch.models.", "axonlaunch.engines.")
_DRAWING = (
    Dropout,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
Mode = Literal["none", "full", "selective"]

_MATRIX_PRODUCTS = {
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    torch.ops.aten._scaled_mm_v2.default,
}
_PROFILER_RANGES = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_ALWAYS_SAVED = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


class _SaveEverySecondProduct:
    """Saves attention, collectives and every second matrix product of one run of a block.

    Forward and recomputation use separate counters, because both must make the same decisions.
    """

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _ALWAYS_SAVED:
            return CheckpointPolicy.MUST_SAVE
        if operation in _MATRIX_PRODUCTS:
            self._products[context.is_recompute] += 1
            if self._products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpointing(
    blocks: Iterable[nn.Module], *, mode: Mode, num_experts: int = 0
) -> None:
    """Make blocks recompute their activations in backward.

    Args:
        blocks: Repeated blocks of a model.
        mode: ``none``; ``full`` saves only each block's inputs; ``selective`` also saves attention,
            collectives and every second matrix product (torchtitan's per-op policy).
        num_experts: Largest number of experts among which a router chooses. Choices are saved, so
            that recomputed blocks route tokens like the forward. 0 if there are no routers. torch
            can't compile blocks that save choices.
    """
    if mode == "none":
        return
    blocks = list(blocks)
    kwargs: dict[str, Any] = {
        "use_reentrant": False,
        # Otherwise each block would save and set generator states, in forward and recomputation.
        "preserve_rng_state": any(map(may_draw, blocks)),
    }
    if mode == "selective":
        kwargs["context_fn"] = _selective_contexts
    if num_experts:
        contexts = kwargs.get("context_fn")
        kwargs["context_fn"] = partial(keep_choices, contexts, num_experts=num_experts)
    for block in blocks:
        # Replace the forward instead of wrapping the module, so that parameter names do not change.
        block.forward = _recomputing(block.forward, kwargs)


def _selective_contexts() -> Any:
    # torch expects a recomputation to run at most the operations of the forward. fully_shard marks
    # more profiler ranges in it, if a part of the block is sharded separately, as experts are.
    SAC_IGNORED_OPS.update(_PROFILER_RANGES)
    return create_selective_checkpoint_contexts(_SaveEverySecondProduct())


def may_draw(block: nn.Module) -> bool:
    """Return whether a block may use random numbers in training, as dropout does.

    This is assumed of all classes that are not from torch or axonlaunch, and of modules with a
    dropout rate, which they pass to ``functional.dropout``, as linear layers with an adapter do.
    """
    return any(
        isinstance(part, _DRAWING)
        or not type(part).__module__.startswith(_KNOWN)
        or any(
            "dropout" in name and isinstance(rate, float) and rate
            for name, rate in vars(part).items()
        )
        for part in block.modules()
    )


def _recomputing(forward: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Wrap a forward to recompute. It is a local function, because torch.compile skips torch's."""

    def forward_again(*inputs: Any, **options: Any) -> Any:
        return checkpoint(forward, *inputs, **kwargs, **options)

    return forward_again
