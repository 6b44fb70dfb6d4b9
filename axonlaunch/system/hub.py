"""Calls the Hugging Face Hub through huggingface_hub, with retries and reasons for failures.

The library is imported only when it is needed. Several of its versions are supported, so errors are
recognized by their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")
TRIES = 3
"""Number of tries if the Hub answers with an error of its own, or with half a file."""
_WAIT_S = 1.0
"""Seconds before the second try; they double each time."""
LOG_IN = "log in with hf auth login, or set HF_TOKEN"
_Kind = Literal[
    "offline",
    "unreachable",
    "gated",
    "no revision",
    "no repository",
    "no token",
    "refused",
    "failed",
    "ended early",
    "other",
]
_BY_NAME: dict[str, _Kind] = {
    "OfflineModeIsEnabled": "offline",
    "GatedRepoError": "gated",
    "RevisionNotFoundError": "no revision",
    "RepositoryNotFoundError": "no repository",
    "LocalTokenNotFoundError": "no token",
}


class HubCallError(Exception):
    """A call of the Hub failed.

    Attributes:
        kind: Category of the failure.
        is_unreachable: Whether the Hub can't be reached, or must not be.
        is_transient: Whether the same call may succeed later.
    """

    def __init__(self, kind: _Kind, reason: str) -> None:
        """Store the kind and the reason, one line without the name of what was asked for."""
        super().__init__(reason)
        self.kind = kind
        self.is_unreachable = kind in ("offline", "unreachable")
        self.is_transient = kind in ("unreachable", "failed", "ended early")


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the module huggingface_hub.

    Raises:
        ImportError: huggingface_hub is not installed.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportError("the Hub needs huggingface_hub; pip install 'axonlaunch[hf]'")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for module in ("constants", "utils"):  # not imported with the package
        importlib.import_module(f"huggingface_hub.{module}")
    return importlib.import_module("huggingface_hub")


def endpoint() -> str:
    """Return the address of the Hub."""
    return str(library().constants.ENDPOINT)


def call_hub(function: Callable[[], _T]) -> _T:
    """Return the result of a function that calls the Hub; retry if the Hub itself failed.

    Raises:
        HubCallError: The Hub refuses or can't be reached.
        ImportError: huggingface_hub is not installed.
    """
    for number in range(TRIES):
        try:
            return function()
        except ImportError:
            raise
        except Exception as error:  # of several versions of two libraries
            is_wrapper = _is_named(error, "LocalEntryNotFoundError")
            reason = (error.__cause__ if is_wrapper else None) or error
            status = getattr(getattr(reason, "response", None), "status_code", None)
            is_passing = is_passing_status(status) or _is_half_a_file(reason)
            if not is_passing or number == TRIES - 1:
                raise _explain(reason, status) from None
            time.sleep(_WAIT_S * 2**number)
    raise AssertionError("the last try returns or raises")


def is_passing_status(status: int | None) -> bool:
    """Return whether the same call may succeed after this HTTP status."""
    return status is not None and (status == 429 or status >= 500)


def _explain(error: BaseException, status: int | None) -> HubCallError:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    for name, kind in _BY_NAME.items():
        if _is_named(error, name):
            return HubCallError(kind, "HF_HUB_OFFLINE is set" if kind == "offline" else text)
    if status in (401, 403):
        return HubCallError("refused", f"the Hub refuses it ({status}); {LOG_IN}")
    if status == 404:  # the Hub names what is missing; another server at its address doesn't
        message = "the Hub's address answers that it is not there (404); check it, and HF_ENDPOINT"
        return HubCallError("refused", message)
    if status is not None and not is_passing_status(status):
        return HubCallError("refused", f"the Hub refuses it ({status})")
    if status is not None:
        return HubCallError("failed", f"the Hub answered with status {status} ({TRIES} tries)")
    if _is_half_a_file(error):
        return HubCallError("ended early", f"the download ended early ({TRIES} tries): {text}")
    if _is_of_connection(error):
        return HubCallError("unreachable", f"the Hub can't be reached: {text}")
    return HubCallError("other", text)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the library's warnings, because errors here report the same."""
    logging = library().utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _is_named(error: BaseException, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(error).__mro__)


def _is_of_connection(error: BaseException) -> bool:
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    is_of_library = bool(packages & {"httpx", "httpx2", "requests"})
    return is_of_library or isinstance(error, ConnectionError | TimeoutError)


def _is_half_a_file(error: BaseException) -> bool:
    is_short = isinstance(error, OSError) and "Consistency check failed" in str(error)
    return is_short or _is_named(error, "RemoteProtocolError")
