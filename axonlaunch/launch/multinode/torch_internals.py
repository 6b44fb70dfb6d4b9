"""The private names of torch that a run of several nodes stands on: all of them.

``tests/house/test_private_names.py`` pins each: when torch moves one, it says which, and the fix
belongs in this file alone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDescription
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _RendezvousState as RendezvousState,
)

__all__ = [
    "NodeDescription",
    "RendezvousState",
    "name_methods_by_frame",
    "round_of",
    "stop_heartbeats",
    "waiting_nodes",
]


def name_methods_by_frame() -> None:
    """Let a rendezvous name the method of each event that it records without ``inspect.stack``.

    That reads the source of every frame, and for a frame of ``exec`` or a notebook it looks through
    all modules: with 6,000 of them half a second an event, so that a node missed its heartbeats.
    """
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    """Return the function that called, which is 1, or one that many calls above it."""
    return sys._getframe(depth).f_code.co_name


def round_of(handler: Any) -> int:
    """Return the number of the round that a rendezvous is in."""
    return int(handler._state_holder.state.round)


def stop_heartbeats(handler: Any) -> None:
    """End the thread that says for a rendezvous that this node is there.

    Nothing public does but ``shutdown``, which closes the rendezvous for all nodes.
    """
    handler._stop_heartbeats()


def waiting_nodes(handler: Any) -> list[str]:
    """Return the addresses of nodes that wait for the next round of a rendezvous, as last read.

    Its ``num_nodes_waiting`` counts only those for which there is room.
    """
    state = handler._state_holder.state
    return [node.addr for node in (*state.wait_list, *state.redundancy_list)]
