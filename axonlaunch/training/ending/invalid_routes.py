"""Names the sample of a token that a router gave an invalid route."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from axonlaunch.data.datasets.loader import Loader
from axonlaunch.engines.expert.routing import InvalidRouteError


@contextmanager
def naming_sample(loader: Loader, *, step: int) -> Iterator[None]:
    """Add the index of the sample to an error of a router.

    Args:
        loader: Loader of this rank's part of each global batch.
        step: Index of the step, from 0.

    Raises:
        InvalidRouteError: A router chose an expert that does not exist, or gave it a weight that is
            not finite.
    """
    try:
        yield
    except InvalidRouteError as error:
        if error.row is None:
            raise
        sample = loader.indices(step)[error.row]
        message = f"{error} (step {step + 1}, sample {sample} of the data set)"
        raise InvalidRouteError(message, token=error.token, row=error.row) from None
