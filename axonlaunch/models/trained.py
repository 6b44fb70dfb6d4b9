"""Which parameters of a model are trained: patterns of their names decide.

It looks at a whole model, on any device, before anything divides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from axonlaunch.config import ConfigIssue
from axonlaunch.config.parameter_groups import explain_unmatched
from axonlaunch.config.schema import TrainConfig


def choose_trained(module: nn.Module, train: TrainConfig) -> None:
    """Freeze a whole model's parameters, in place, and then train some of those that are frozen.

    A pattern that matches nothing is passed over, for a module may be smaller than the run's.

    Args:
        module: Undivided.
        train: Has the patterns.
    """
    for patterns, is_trained in ((train.freeze, False), (train.unfreeze, True)):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if _matches(name, patterns) and parameter.is_floating_point():
                parameter.requires_grad_(is_trained)


def frozen_problems(module: nn.Module, train: TrainConfig) -> Iterator[ConfigIssue]:
    """Yield the patterns that match no parameter, and a run that would train nothing.

    Args:
        module: Whole, as ``choose_trained`` left it.
        train: Has the patterns.
    """
    if not train.freeze and not train.unfreeze:
        return
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    matched = True
    for key, patterns in (("train.freeze", train.freeze), ("train.unfreeze", train.unfreeze)):
        for pattern in patterns:
            if not _matches_any(names, pattern):
                matched = False
                yield ConfigIssue(
                    key, f"{pattern} matches no parameter{explain_unmatched(pattern, names)}"
                )
    if matched and not any(parameter.requires_grad for parameter in module.parameters()):
        message = "leaves no parameter that is trained; name fewer, or name some in train.unfreeze"
        yield ConfigIssue("train.freeze", message, train.freeze)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matches_any(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
