"""Registers data-parallel variants from plug-ins and packages, with ``register_data_parallel``.

The registry itself is in ``config.options.data_parallel``. A registered variant keeps full
parameters on every rank; variants that shard parameters cannot be registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from axonlaunch.config.options.data_parallel import DATA_PARALLEL, DataParallelFacts

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def register_data_parallel(
    name: str,
    *,
    averages: Literal["gradients", "parameters"],
    config: type | None = None,
    period: Callable[[Any], int] | None = None,
    summary: str | None = None,
) -> Callable[[_Builder], _Builder]:
    """Register a class of ``Replicas`` as ``strategy.data_parallel=NAME``.

    Args:
        name: Name of the variant.
        averages: Values that the ranks average. "gradients" in every step: the result equals that
            of one process, and `plan` includes the variant in its search. "parameters" every
            ``period`` steps.
        config: Dataclass with a field ``name`` that types ``strategy.options``.
        period: Maps the options to the number of steps between averages of parameters, used to
            estimate traffic; None for 1.
        summary: One line for ``axonlaunch ls data_parallel``; None for the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration is not a dataclass with a name.
    """
    facts = DataParallelFacts(averages=averages, period=period)

    def register(builder: _Builder) -> _Builder:
        described = summary or (builder.__doc__ or f"from {builder.__module__}").splitlines()[0]
        DATA_PARALLEL.add(name, builder, summary=described, config=config, facts=facts)
        return builder

    DATA_PARALLEL.check_config(name, config)
    return register
