"""Saved states of runs: written by every rank at once, whole or not at all.

torch.distributed.checkpoint does the storage; any layout reads what any layout wrote. What writes
(``checkpoint.saver``) imports torch; what is here does so only when it opens a checkpoint.
"""

from axonlaunch.checkpoint.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.checkpoint.reader import (
    load_checkpoint,
    load_model,
    model_differences,
    saved_states,
)
from axonlaunch.checkpoint.step_folders import (
    Retention,
    corrupt_checkpoints,
    find_checkpoint,
    latest,
    list_checkpoints,
    sweep_partial,
)

__all__ = [
    "Checkpoint",
    "CorruptCheckpointError",
    "Retention",
    "corrupt_checkpoints",
    "find_checkpoint",
    "latest",
    "list_checkpoints",
    "load_checkpoint",
    "load_model",
    "model_differences",
    "saved_states",
    "sweep_partial",
]
