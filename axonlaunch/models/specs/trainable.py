"""Selects the parameters of a model to train, by patterns of their names.

The number of a block may also be counted from the end, as in Python: of 32 blocks, ``layers.31.*``
and ``layers.-1.*`` are the last. The model must be unsharded, on any device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from axonlaunch.config import ConfigIssue
from axonlaunch.config.optimization.parameter_groups import explain_unmatched
from axonlaunch.config.schema import TrainConfig


def choose_trainable(module: nn.Module, train: TrainConfig) -> None:
    """Freeze parameters of an unsharded model in place, then unfreeze some of them again.

    Patterns without a match are ignored, because a module may be smaller than the run's model.

    Args:
        module: Unsharded model.
        train: Configuration with the patterns.
    """
    for patterns, is_trained in ((train.freeze, False), (train.unfreeze, True)):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if _matches(_names(module, name), patterns) and parameter.is_floating_point():
                parameter.requires_grad_(is_trained)


def frozen_problems(module: nn.Module, train: TrainConfig) -> Iterator[ConfigIssue]:
    """Yield patterns that match no parameter, and runs that would train nothing.

    Args:
        module: Unsharded model, after ``choose_trainable``.
        train: Configuration with the patterns.
    """
    if not train.freeze and not train.unfreeze:
        return
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    matched = True
    for key, patterns in (("train.freeze", train.freeze), ("train.unfreeze", train.unfreeze)):
        for pattern in patterns:
            if not any(_matches(_names(module, name), [pattern]) for name in names):
                matched = False
                yield ConfigIssue(
                    key, f"{pattern} matches no parameter{explain_unmatched(pattern, names)}"
                )
    if matched and not any(parameter.requires_grad for parameter in module.parameters()):
        message = "leaves no parameter that is trained; name fewer, or name some in train.unfreeze"
        yield ConfigIssue("train.freeze", message, train.freeze)


def _names(module: nn.Module, name: str) -> list[str]:
    """Return a parameter's name, and the one with its first number counted from the end."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            blocks = module.get_submodule(".".join(parts[:position]))
            from_end = int(part) - len(blocks._modules)
            return [name, ".".join((*parts[:position], str(from_end), *parts[position + 1 :]))]
    return [name]


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
