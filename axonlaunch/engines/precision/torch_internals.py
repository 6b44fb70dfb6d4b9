"""All private names of torch that loss scales and products in 8 bits use, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

amp_update_scale = torch._amp_update_scale_
"""Updates a loss scale on the device, as ``torch.amp.GradScaler`` does."""


def needs_gradient(ctx: Any, index: int) -> bool:
    """Return whether the running backward uses the gradient of an input of an autograd function.

    A zero-bubble pipeline computes the gradients of inputs and those of weights in two backwards,
    and ``ctx.needs_input_grad`` is the same in both.

    Args:
        ctx: Context of the function, in its backward.
        index: Index of the input, which is the output of another operation.
    """
    if not ctx.needs_input_grad[index]:
        return False
    if torch.compiler.is_compiling():  # one backward of the block computes all gradients
        return True
    return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
