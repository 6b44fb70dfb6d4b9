"""The mock world: ranks are threads of one process with real collectives between them.

``world`` starts the ranks and ``turn_scheduler`` lets one of them run at a time. They exchange data
through ``exchange``, and ``output`` is a tensor that an operation fills. ``process_group``,
``work`` and ``store`` implement torch's interfaces. ``torch_internals`` contains the private names
of torch that are used. No ports and no other processes are used, and no accelerator unless the
ranks compute on one.
"""

from axonlaunch.comm.mock.world import MockWorld

__all__ = ["MockWorld"]
