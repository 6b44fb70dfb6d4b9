"""The private names of torch that a run of several nodes stands on: all of them.

``tests/house/test_private_names.py`` pins each: when torch moves one, it says which, and the fix
belongs in this file alone.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDescription
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _RendezvousState as RendezvousState,
)

__all__ = ["NodeDescription", "RendezvousState", "round_of", "stop_heartbeats"]


def round_of(handler: Any) -> int:
    """Return the number of the round that a rendezvous is in."""
    return int(handler._state_holder.state.round)


def stop_heartbeats(handler: Any) -> None:
    """End the thread that says for a rendezvous that this node is there.

    Nothing public does but ``shutdown``, which closes the rendezvous for all nodes.
    """
    handler._stop_heartbeats()
