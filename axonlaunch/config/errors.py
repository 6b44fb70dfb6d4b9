"""What is wrong with a configuration, in the form in which a user reads it.

It holds the form alone; each package finds its own problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from axonlaunch.config.environment_values import EnvironmentText

_SHOWN = 200
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class ConfigIssue:
    """One thing to put right before anything starts.

    Attributes:
        key: The dotted key at fault, ``strategy.fsdp.sharding``; empty where no key is.
        message: What was seen and what to write instead.
        value: The value as the user gave it; ``...`` where none is to be shown.
        traceback: Of a user's code that failed, for ``--debug``; empty for a mistake.
    """

    key: str
    message: str
    value: Any = ...
    traceback: str = field(default="", compare=False, repr=False)

    @classmethod
    def of_failure(
        cls, key: str, what: str, error: BaseException, value: Any = ..., *, then: str = ""
    ) -> ConfigIssue:
        """Return the issue of a user's code that failed, with its file and line.

        ``model=custom: building it failed with KeyError: 'width' (models.py:7)``.

        Args:
            key: The dotted key that chose the code.
            what: What was done with it, ``"building it"``.
            error: What it raised, which has its traceback.
            value: Of the key.
            then: What to write instead, where that is known.
        """
        import traceback  # here, as below: what is right needs neither

        message = f"{what} failed with {failure_text(error)}" + (f"; {then}" if then else "")
        return cls(key, message, value, "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        if not self.key:
            return self.message
        shown = "" if self.value is ... else f"={_shortened(plain(self.value))}"
        return f"{self.key}{shown}: {self.message}"


class ConfigError(ValueError):
    """A configuration that can't be run; ``problems`` holds every reason."""

    def __init__(self, problems: list[ConfigIssue]) -> None:
        super().__init__(problems)  # also what it is pickled as
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


@contextmanager
def gathering(issues: list[ConfigIssue]) -> Iterator[None]:
    """Add what is refused within to ``issues``, so that all of it is reported at once."""
    try:
        yield
    except ConfigError as error:
        issues += error.problems


def failure_text(error: BaseException) -> str:
    """Return what a user's code raised and where: ``KeyError: 'width' (models.py:7)``."""
    from axonlaunch.system.frame_origin import place_in_user_code

    return f"{type(error).__name__}: {error}{place_in_user_code(error)}"


def plain(value: Any) -> str:
    """Write a value as one would on the command line: ``[1,2]``, ``true``, ``null``, ``0.5``."""
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
    """Write line breaks as escape sequences."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def target_problems(target: str | None, attribute: str) -> list[tuple[str, str]]:
    """Return ``(field, message)`` if a ``target`` does not name something to import."""
    module, _, name = (target or "").partition(":")
    if module and name:
        return []
    return [("target", f"is not of the form package.module:{attribute}")]


def divisors(number: int) -> list[int]:
    """Return what divides a number, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def divisor_of(number: int, *, at_most: int = 8) -> str:
    """List what divides a number, for messages: ``1, 2, 4 or 8``; long lists keep both ends."""
    numbers = divisors(number)
    if len(numbers) > at_most:
        numbers = numbers[: at_most - 2] + numbers[-2:]
    return one_of(numbers)


def one_of(values: list[Any] | tuple[Any, ...]) -> str:
    """Join alternatives for a sentence: ``a, b or c``."""
    shown = [plain(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
