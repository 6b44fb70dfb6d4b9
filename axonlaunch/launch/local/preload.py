"""Imports the modules that ranks need; the fork server imports this module once.

Torch imports some of these modules on first use, which would cost every rank a second.
"""

import errno
import gc
import importlib
import os
import sys
from types import TracebackType

from axonlaunch.system.node import allocator_settings
from axonlaunch.system.processes.process_title import name_process

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
    "axonlaunch.models.architectures.gpt",
    "axonlaunch.models.architectures.llama",
    "axonlaunch.preflight.checks",
)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print in one line why the server ended. Its next client reports the consequences.

    If the server ran out of open files, its exit status says so and the parent reports it.
    """
    if issubclass(kind, EOFError):  # the client ended during a request and reports why itself
        return
    if os.getpid() == _SERVER and _is_out_of_files(error, trace):
        os._exit(errno.EMFILE)
    print(f"the fork server ended: {kind.__name__}: {error}", file=sys.stderr)


def _is_out_of_files(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an error shows that this process can't open more files.

    The kernel drops file descriptors that are sent to such a process. Python then finds fewer than
    announced ("Len is 4 but msg[0] is 5") or none.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "recvfds"


_SERVER = os.getpid()
name_process("fork server")
sys.excepthook = _print_error
# The variable was set only for this process; processes that a rank starts must not inherit it.
os.environ.pop("PYTHONSAFEPATH", None)
# Imports create almost no garbage, and collecting it would take a fifth of their time.
gc.disable()
# Set allocator options before torch is imported, because torch may read them then.
allocator_settings.grow_segments()
importlib.import_module("axonlaunch.launch.local.torch_internals").defer_compiler()
for module in MODULES:
    importlib.import_module(module)
# The first use of record_function imports more modules in builds of torch with a CUPTI monitor.
with sys.modules["torch"].profiler.record_function("imported"):
    pass
# Ranks share the memory pages of these objects until a garbage collection writes to them.
gc.freeze()
gc.enable()
