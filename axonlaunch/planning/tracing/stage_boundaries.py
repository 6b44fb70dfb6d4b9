"""Finds the tensors that pass between pipeline stages, in one process with the whole model.

The model runs once, without values. Each block must pass on exactly one tensor. A tuple is allowed
if the next block is known to take only its first element.
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
    """Return the input and output of each stage, as tensors of the right shape and type.

    Args:
        model: The full model, or one with fewer blocks if all blocks are equal. It must compute
            in the types of its stages.
        blocks: Full names of the model's blocks, in order.
        stages: All stages of the pipeline.
        inputs: Inputs of one micro-batch.
        takes_first: Whether a block takes only the first element of a tuple.

    Returns:
        ``{stage: (input, output)}``.

    Raises:
        ConfigError: A block returns something other than one tensor.
    """
    block_outputs: dict[int, Tensor] = {}

    def record_output(index: int, output: object) -> None:
        if takes_first and isinstance(output, tuple):
            output = output[0]
        if not isinstance(output, Tensor):
            message = f"{blocks[index]} returns {type(output).__name__}; stages pass one tensor on"
            raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, len(stages))])
        block_outputs[index] = output

    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, _, output, index=index: record_output(index, output)
        )
        for index, name in enumerate(blocks)
    ]
    was_training = model.training
    model.eval()
    outputs = model(inputs)
    model.train(was_training)
    for hook in hooks:
        hook.remove()

    def output_of(block: int) -> Tensor:
        return block_outputs[min(block, len(blocks) - 1)]

    return {
        stage.index: (
            inputs if stage.is_first else output_of(stage.first - 1),
            outputs if stage.is_last else output_of(stage.last - 1),
        )
        for stage in stages
    }
