"""What passes between the stages of a pipeline, found by one process from the whole model.

It runs the model once, without values; a model whose blocks pass on more than one tensor is
refused, but for a tuple of which the first is known to be all that the next block takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.engines.pipeline.split import Part


@torch.no_grad()
def find(
    model: nn.Module,
    *,
    blocks: Sequence[str],
    stages: Sequence[Part],
    inputs: Tensor,
    takes_first: bool = False,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return what each stage takes and gives, as tensors of the shape and type.

    Args:
        model: Whole, or with fewer of blocks that are all alike; it computes in the types that its
            stages would.
        blocks: Full names of what it has of what stages are made of, in order.
        stages: All of them.
        inputs: One micro-batch.
        takes_first: Whether of a tuple the next block takes the first element alone.

    Raises:
        ConfigError: A block gives something other than one tensor.
    """
    after: dict[int, Tensor] = {}

    def note(index: int, output: object) -> None:
        if takes_first and isinstance(output, tuple):
            output = output[0]
        if not isinstance(output, Tensor):
            message = f"{blocks[index]} gives {type(output).__name__}; stages pass on one tensor"
            raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, len(stages))])
        after[index] = output

    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, _, output, index=index: note(index, output)
        )
        for index, name in enumerate(blocks)
    ]
    was_training = model.training
    model.eval()
    outputs = model(inputs)
    model.train(was_training)
    for hook in hooks:
        hook.remove()

    def passed_by(block: int) -> Tensor:
        return after[min(block, len(blocks) - 1)]

    return {
        stage.index: (
            inputs if stage.is_first else passed_by(stage.first - 1),
            outputs if stage.is_last else passed_by(stage.last - 1),
        )
        for stage in stages
    }
