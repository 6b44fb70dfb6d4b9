"""Imported once by the fork server: whatever a rank would otherwise import by itself.

Torch imports some of it only when first used, which would cost every rank a second.
"""

import errno
import gc
import importlib
import os
import sys
from types import TracebackType

from axonlaunch.system import allocator_settings

MODULES = (
    "numpy.ma",
    "yaml",
    "torch._dynamo.config",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.serialization.config",
    "axonlaunch.launch.local.rank_process",
    "axonlaunch.models.gpt",
    "axonlaunch.models.llama",
    "axonlaunch.preflight.checks",
)


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in a line why the server ends; whoever asks it next reports the rest.

    A server without open files left says it by its exit status, as its parent reports that.
    """
    if issubclass(kind, EOFError):  # who asked has gone in the middle of it, and says why itself
        return
    if os.getpid() == _SERVER and _is_out_of_files(error, trace):
        os._exit(errno.EMFILE)
    print(f"the fork server ended: {kind.__name__}: {error}", file=sys.stderr)


def _is_out_of_files(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether a process may have no more open files, as an error in this trace shows.

    The kernel drops descriptors that are sent to such a process; Python then finds fewer than were
    announced, "Len is 4 but msg[0] is 5", or none.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "recvfds"


_SERVER = os.getpid()
sys.excepthook = _say
# It was for this process alone; what a rank starts shall find what its user expects.
os.environ.pop("PYTHONSAFEPATH", None)
# Imports make next to no garbage; looking for it would take a fifth of their time.
gc.disable()
# torch may read it when it is imported.
allocator_settings.grow_segments()
importlib.import_module("axonlaunch.launch.local.torch_internals").defer_compiler()
for module in MODULES:
    importlib.import_module(module)
with sys.modules["torch"].profiler.record_function("imported"):  # by the first one, where torch has
    pass  # a monitor of CUPTI
# Ranks share these objects' pages for as long as no garbage collection touches them.
gc.freeze()
gc.enable()
