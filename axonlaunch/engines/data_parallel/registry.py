"""How a data-parallel variant joins: ``register_data_parallel``, in a plug-in or in a package.

The table itself is ``config.data_parallel``'s. A variant keeps whole parameters on every rank; what
shards them can't be added from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from axonlaunch.config.data_parallel import DATA_PARALLEL, DataParallelFacts

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
        name: The name.
        averages: What its ranks average. Gradients, in every step: it then computes what one
            process does, and `plan` searches it too. Parameters, every ``period`` steps.
        config: Dataclass with a field ``name`` that types ``strategy.options``.
        period: From the options to the steps between two averages of parameters, for estimates of
            the traffic; None: 1.
        summary: One line for ``axonlaunch ls data_parallel``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration is no dataclass with a name.
    """
    facts = DataParallelFacts(averages=averages, period=period)

    def register(builder: _Builder) -> _Builder:
        described = summary or (builder.__doc__ or f"from {builder.__module__}").splitlines()[0]
        DATA_PARALLEL.add(name, builder, summary=described, config=config, facts=facts)
        return builder

    DATA_PARALLEL.check_config(name, config)
    return register
