"""Saves and reads the states of runs; all ranks write together, and a checkpoint is atomic.

torch.distributed.checkpoint does the storage, so any layout reads a checkpoint of any other layout.
``checkpoint.saving.saver`` imports torch; the functions here import it only when they open a
checkpoint.
"""

from axonlaunch.checkpoint.format.manifest import Checkpoint, CorruptCheckpointError
from axonlaunch.checkpoint.format.step_folders import (
    Retention,
    corrupt_checkpoints,
    find_checkpoint,
    latest,
    list_checkpoints,
    sweep_partial,
)
from axonlaunch.checkpoint.loading.reader import (
    load_checkpoint,
    load_model,
    model_differences,
    saved_states,
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
