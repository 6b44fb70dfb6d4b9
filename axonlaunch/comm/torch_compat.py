"""Functions that torch 2.13 renamed, under their new names, and one that it has no public name for.

torch 2.11 has only the old names, and 2.13 warns of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set how long a group of gloo or NCCL waits in a collective.

    ``init_device_mesh`` takes no time limit: its groups have torch's, 30 minutes, whatever the
    world's is.
    """
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
