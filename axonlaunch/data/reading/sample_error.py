"""The error of a sample that can't be read, with the dataset and the sample's index."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from axonlaunch.config.problems.errors import ConfigError, PlainError, failure_text


class SampleError(RuntimeError):
    """A sample could not be read. The cause is the exception of the user's code, or its text."""


class WorkerDiedError(SampleError, PlainError):
    """A process that reads samples ended before the rank did."""


class WorkerTracebackError(Exception):
    """Shows the traceback of an exception in another process, as the cause of an error here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}\n"


@dataclass(frozen=True)
class WorkerFailure:
    """An exception in a worker process, as sent to the rank.

    Attributes:
        message: The message of the ``SampleError``.
        traceback: Traceback of the exception with those of its causes.
        refusal: The exception, if it is an error of the user that needs no traceback.
    """

    message: str
    traceback: str
    refusal: ConfigError | None = None

    @classmethod
    def of(cls, error: Exception) -> WorkerFailure:
        """Describe an exception."""
        text = "".join(traceback.format_exception(error.__cause__ or error))
        message = str(error) if isinstance(error, SampleError) else failure_text(error)
        return cls(message, text, error if isinstance(error, ConfigError) else None)

    def reraise(self) -> None:
        """Raise the exception in this process.

        Raises:
            ConfigError: The exception was an error of the user.
            SampleError: The original exception had any other type.
        """
        if self.refusal is not None:
            raise self.refusal
        raise SampleError(self.message) from WorkerTracebackError(self.traceback)


def original(error: Exception) -> BaseException:
    """Return the exception of the user's code behind a ``SampleError``, or the error itself."""
    return error.__cause__ or error if isinstance(error, SampleError) else error


@contextmanager
def naming(action: str) -> Iterator[None]:
    """Convert exceptions of the user's code to a ``SampleError`` with the failed action.

    Args:
        action: Dataset and samples, such as "data=custom (m:C): reading sample 3".
    """
    try:
        yield
    except (ConfigError, SampleError):
        raise
    except Exception as error:
        raise SampleError(f"{action} failed with {failure_text(error)}") from error
