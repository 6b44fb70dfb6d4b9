"""Keeps the state of a run that its actor must not forget if Ray restarts it on another node.

It is in the store of the cluster's head. Ray has no public interface to it; this one is used by its
libraries.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_NAMESPACE = "axonlaunch"


@dataclass(frozen=True)
class KeptState:
    """State of a run's actor.

    Attributes:
        lost: Number of lost nodes.
        is_stopping: Whether the run was asked to stop.
    """

    lost: int = 0
    is_stopping: bool = False

    @classmethod
    def load(cls) -> KeptState:
        """Return the state of this actor. If it kept one before, its node was lost too."""
        from ray.experimental.internal_kv import _internal_kv_get

        stored = _internal_kv_get(_key(), namespace=_NAMESPACE)
        state = cls()
        if stored:
            kept = json.loads(stored)
            state = cls(lost=kept["lost"] + 1, is_stopping=kept["is_stopping"])
        state.save()
        return state

    def save(self) -> None:
        """Keep the state until this actor deletes it."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(_key(), json.dumps(asdict(self)), namespace=_NAMESPACE)


def delete_state() -> None:
    """Delete the state of this actor."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(), namespace=_NAMESPACE)


def _key() -> str:
    """Return the number of this actor, which a restart does not change."""
    import ray

    return str(ray.get_runtime_context().get_actor_id())
