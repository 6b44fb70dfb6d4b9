"""Problems of a configuration, and their text for users.

Each package finds its problems itself; this module defines only their form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from axonlaunch.config.values.environment_values import EnvironmentText

INVALID, TRANSIENT = 2, 75
"""Exit statuses of commands. 75 is ``EX_TEMPFAIL`` of sysexits.h: the command may succeed later."""
_SHOWN = 200
"""Largest number of characters of a value in a message."""


@dataclass(frozen=True)
class ConfigIssue:
    """One problem that must be fixed before anything starts.

    Attributes:
        key: Dotted key with the problem, ``strategy.fsdp.sharding``; empty if there is no key.
        message: Description of the problem, and what to write instead.
        value: Value as the user wrote it; ``...`` if none should be shown.
        traceback: Traceback of failed user code, for ``--debug``; else empty.
        is_transient: Whether the problem may disappear without a change of the configuration, such
            as a node that has not joined yet.
    """

    key: str
    message: str
    value: Any = ...
    traceback: str = field(default="", compare=False, repr=False)
    is_transient: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def of_failure(
        cls, key: str, what: str, error: BaseException, value: Any = ..., *, then: str = ""
    ) -> ConfigIssue:
        """Return the issue of failed user code, with its file and line.

        ``model=custom: building it failed with KeyError: 'width' (models.py:7)``.

        Args:
            key: Dotted key that selected the code.
            what: Action that failed, ``"building it"``.
            error: Exception with its traceback.
            value: Value of the key.
            then: Suggestion what to write instead; may be empty.
        """
        import traceback  # imported here, as below, because valid configurations don't need it

        message = f"{what} failed with {failure_text(error)}" + (f"; {then}" if then else "")
        return cls(key, message, value, "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        if not self.key:
            return self.message
        shown = "" if self.value is ... else f"={_shortened(plain(self.value))}"
        return f"{self.key}{shown}: {self.message}"


class PlainError(Exception):
    """An error whose message says what went wrong; reports leave out its traceback."""


class ConfigError(ValueError):
    """Invalid configuration; ``problems`` lists all problems."""

    def __init__(self, problems: list[ConfigIssue]) -> None:
        super().__init__(problems)  # arguments for pickling
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def exit_status(problems: Sequence[ConfigIssue]) -> int:
    """Return the exit status of a command: ``TRANSIENT`` if all its problems may pass."""
    is_passing = bool(problems) and all(problem.is_transient for problem in problems)
    return TRANSIENT if is_passing else INVALID


@contextmanager
def gathering(issues: list[ConfigIssue]) -> Iterator[None]:
    """Catch ``ConfigError`` in the block and add its problems to ``issues``."""
    try:
        yield
    except ConfigError as error:
        issues += error.problems


@contextmanager
def change_problems(change: Callable[[ConfigIssue], ConfigIssue]) -> Iterator[None]:
    """Replace each problem of a ``ConfigError`` that the block raises.

    Args:
        change: Returns the new problem for one of the error.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError([change(problem) for problem in error.problems]) from error


def failure_text(error: BaseException) -> str:
    """Return the exception of user code and its location: ``KeyError: 'width' (models.py:7)``."""
    from axonlaunch.system.frame_origin import place_in_user_code

    return f"{type(error).__name__}: {error}{place_in_user_code(error)}"


def plain(value: Any) -> str:
    """Format a value in the syntax of overrides: ``[1,2]``, ``true``, ``null``, ``0.5``."""
    if value is None:
        return "null"
    if isinstance(value, EnvironmentText):
        return value.written
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(plain(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{plain(item)}" for key, item in value.items()) + "}"
    return str(value)


def _shortened(text: str) -> str:
    text = in_one_line(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def in_one_line(text: str) -> str:
    """Replace line breaks by escape sequences."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def value_problems(config: Any) -> list[tuple[str, str]]:
    """Return ``(field, message)`` for each invalid combination of a group's values.

    Args:
        config: Dataclass of the group; only some of them have a method ``problems``.
    """
    problems: list[tuple[str, str]] = getattr(config, "problems", list)()
    return problems


def refuse_invalid(group: str, config: Any) -> None:
    """Check values of a group that depend on each other.

    Raises:
        ConfigError: Values contradict each other; all problems are in it.
    """
    if problems := value_problems(config):
        raise ConfigError(
            [
                ConfigIssue(f"{group}.{name}", message, getattr(config, name, ...))
                for name, message in problems
            ]
        )


def target_problems(target: str | None, attribute: str) -> list[tuple[str, str]]:
    """Return ``(field, message)`` if a ``target`` is not of the form ``module:attribute``, or [].

    Args:
        target: Value of the field ``target``.
        attribute: Placeholder for the attribute in the message, such as ``Class``.
    """
    module, _, name = (target or "").partition(":")
    if module and name:
        return []
    return [("target", f"is not of the form package.module:{attribute}")]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def divisor_of(number: int, *, at_most: int = 8) -> str:
    """Return the divisors of a number as text: ``1, 2, 4 or 8``.

    Args:
        number: Number to divide.
        at_most: Number of divisors to name. If there are more, the largest two and the smallest
            ones are named.
    """
    numbers = divisors(number)
    if len(numbers) > at_most:
        numbers = numbers[: at_most - 2] + numbers[-2:]
    return one_of(numbers)


def one_of(values: list[Any] | tuple[Any, ...]) -> str:
    """Join alternatives: ``a, b or c``."""
    shown = [plain(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
