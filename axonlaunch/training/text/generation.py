"""Generates text from a trained token model, one token at a time.

There is no cache of keys and values: the whole context is computed again for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from axonlaunch.training.text.sampling_options import SamplingOptions


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt_tokens: Sequence[int],
    options: SamplingOptions,
    *,
    context_length: int,
    is_over: Callable[[list[int]], bool] = lambda new_tokens: False,
) -> list[int]:
    """Continue a prompt. The same seed gives the same tokens on every rank that calls this.

    Args:
        model: Maps tokens [1, T] to logits [1, T, vocab]. A module is fed tokens on the device of
            its parameters; a function must move them itself. For a sharded model, all ranks must
            call this.
        prompt_tokens: At least one token.
        options: Number of new tokens, and how each is drawn.
        context_length: Maximum number of tokens to feed the model; earlier tokens are dropped.
        is_over: Called with the new tokens; generation stops when it returns true.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: The prompt is empty.
    """
    if not prompt_tokens:
        raise ValueError("the prompt is empty; give at least one token")
    # Sample on the CPU, so that a seed gives the same text on every kind of device.
    generator = torch.Generator().manual_seed(options.seed)
    tokens = list(prompt_tokens)
    with _evaluating(model) as device:
        for _ in range(options.tokens):
            context = torch.tensor([tokens[-context_length:]], device=device)
            logits = model(context)[0, -1].float().cpu()
            tokens.append(_sample_token(logits, generator, options))
            if is_over(tokens[len(prompt_tokens) :]):
                break
    return tokens[len(prompt_tokens) :]


@contextmanager
def _evaluating(model: Callable[[Tensor], Tensor]) -> Iterator[torch.device]:
    """Put a module in evaluation mode within the context; yield the device for its inputs."""
    if not isinstance(model, nn.Module):
        yield torch.device("cpu")
        return
    was_training = model.training
    model.eval()
    try:
        yield next(model.parameters()).device
    finally:
        model.train(was_training)


def _sample_token(logits: Tensor, generator: torch.Generator, options: SamplingOptions) -> int:
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits, indices = logits.topk(top_k)
    else:
        indices = torch.arange(len(logits))
    # In fp64 and with the maximum at 0, because division by a tiny temperature may overflow.
    probabilities = ((logits - logits.max()).double() / temperature).softmax(-1).float()
    if top_p is not None:
        probabilities, order = probabilities.sort(descending=True, stable=True)
        sum_of_likelier = probabilities.cumsum(-1) - probabilities
        indices, probabilities = indices[order], probabilities.where(sum_of_likelier < top_p, 0.0)
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])
