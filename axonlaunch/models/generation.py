"""Text from a trained token model, a token at a time.

Every token runs the whole context again: it keeps no cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    context_length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    is_over: Callable[[list[int]], bool] = lambda new_tokens: False,
) -> list[int]:
    """Continue a prompt; the same seed gives the same tokens, on every rank that calls it.

    Args:
        model: Tokens [1, T] to logits [1, T, vocab]: a module, or a function that sees to
            devices itself. All ranks of a sharded one must call.
        prompt_tokens: At least one token.
        max_new_tokens: Tokens to add.
        context_length: Tokens that the model is shown at most: the last ones.
        temperature: Divides the logits; 0 takes the likeliest token, as what is close to it does.
        top_k: Draw among so many likeliest tokens; None: among all.
        seed: Random seed.
        is_over: Says of the new tokens whether there are to be no more.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: The prompt is empty, or a number is out of range.
    """
    if not prompt_tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if not temperature >= 0:  # nor is NaN
        raise ValueError(f"temperature={temperature}: must be 0 or more; 0 is greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1, or None for all tokens")
    # Drawn on the CPU, so that a seed gives the same text on every kind of device.
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt_tokens)
    with _evaluating(model) as device:
        for _ in range(max_new_tokens):
            context = torch.tensor([tokens[-context_length:]], device=device)
            logits = model(context)[0, -1].float().cpu()
            tokens.append(_draw(logits, generator, temperature=temperature, top_k=top_k))
            if is_over(tokens[len(prompt_tokens) :]):
                break
    return tokens[len(prompt_tokens) :]


@contextmanager
def _evaluating(model: Callable[[Tensor], Tensor]) -> Iterator[torch.device]:
    """Put a module in evaluation mode for a while; give the device of what it is fed."""
    if not isinstance(model, nn.Module):
        yield torch.device("cpu")
        return
    was_training = model.training
    model.eval()
    try:
        yield next(model.parameters()).device
    finally:
        model.train(was_training)


def _draw(
    logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits, indices = logits.topk(top_k)
    else:
        indices = torch.arange(len(logits))
    # In fp64, and 0 for the likeliest: over a tiny temperature no other number is one.
    chances = ((logits - logits.max()).double() / temperature).softmax(-1).float()
    return int(indices[torch.multinomial(chances, 1, generator=generator)])
