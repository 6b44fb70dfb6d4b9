"""Saved states of runs: written by every rank at once, whole or not at all.

torch.distributed.checkpoint does the storage; any layout reads what any layout wrote.
"""

from axonlaunch.checkpoint.store import (
    Checkpoint,
    differences,
    latest,
    load,
    load_model,
    prune,
    resolve,
    save,
    saved_states,
    sweep_partial,
    unreadable,
)

__all__ = [
    "Checkpoint",
    "differences",
    "latest",
    "load",
    "load_model",
    "prune",
    "resolve",
    "save",
    "saved_states",
    "sweep_partial",
    "unreadable",
]
