"""The mock world: ranks as threads of one process, real collectives between them.

``world`` starts the ranks; ``turn_scheduler`` lets one run at a time; ``exchange`` is where they
exchange data, ``output`` what an operation fills; ``process_group``, ``work`` and ``store`` are
what torch sees of it; ``torch_internals`` holds the private names of torch that it stands on.
Nothing here uses an accelerator, a port or a second process.
"""

from axonlaunch.comm.mock.world import MockWorld

__all__ = ["MockWorld"]
