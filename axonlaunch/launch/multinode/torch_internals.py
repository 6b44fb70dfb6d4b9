"""All private names of torch that runs on several nodes use.

``tests/house/test_private_names.py`` checks each name. If torch changes one, only this file needs a
fix.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _NodeDesc as NodeDescription,
    _RendezvousState as RendezvousState,
)

__all__ = [
    "NodeDescription",
    "RendezvousState",
    "has_all",
    "name_methods_by_frame",
    "round_of",
    "stop_heartbeats",
    "waiting_nodes",
]


def name_methods_by_frame() -> None:
    """Make a rendezvous determine method names for its events without ``inspect.stack``.

    ``inspect.stack`` reads the source of every frame, and searches all modules for frames of
    ``exec`` or a notebook. With 6,000 modules this took half a second for each event, and the node
    missed its heartbeats.
    """
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    """Return the name of the function ``depth`` calls above this one; 1 is the caller."""
    return sys._getframe(depth).f_code.co_name


def round_of(handler: Any) -> int:
    """Return the number of a rendezvous's current round."""
    return int(handler._state_holder.state.round)


def has_all(handler: Any, number: int, members: int) -> bool:
    """Return whether a round of a rendezvous still has all of its nodes, as last read."""
    state = handler._state_holder.state
    return bool(state.round == number and len(state.participants) == members)


def stop_heartbeats(handler: Any) -> None:
    """End the thread that sends this node's heartbeats to a rendezvous.

    The only public alternative is ``shutdown``, which closes the rendezvous for all nodes.
    """
    handler._stop_heartbeats()


def waiting_nodes(handler: Any) -> list[str]:
    """Return the addresses of nodes that wait for the next round of a rendezvous, as last read.

    Its ``num_nodes_waiting`` counts only those for which there is room in a round that has begun.
    """
    state = handler._state_holder.state
    joining = () if state.complete else state.participants
    return [node.addr for node in (*joining, *state.wait_list, *state.redundancy_list)]
