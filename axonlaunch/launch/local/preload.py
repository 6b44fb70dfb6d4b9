"""Imports the modules that ranks need; the fork server imports this module once.

Torch imports some of these modules on first use, which would cost every rank a second.
"""

import gc
import importlib
import os
import sys
from types import TracebackType

from axonlaunch.system import allocator_settings

MODULES = (
    "numpy.ma",
    "yaml",
    "torch._dynamo",
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


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print in one line why the server ended. Its next client reports the consequences."""
    del trace
    if issubclass(kind, EOFError):  # the client ended during a request and reports why itself
        return
    print(f"the fork server ended: {kind.__name__}: {error}", file=sys.stderr)


sys.excepthook = _print_error
# The variable was set only for this process; processes that a rank starts must not inherit it.
os.environ.pop("PYTHONSAFEPATH", None)
# Imports create almost no garbage, and collecting it would take a fifth of their time.
gc.disable()
# Set allocator options before torch is imported, because torch may read them then.
allocator_settings.grow_segments()
for module in MODULES:
    importlib.import_module(module)
# The first use of record_function imports more modules in builds of torch with a CUPTI monitor.
with sys.modules["torch"].profiler.record_function("imported"):
    pass
# Ranks share the memory pages of these objects until a garbage collection writes to them.
gc.freeze()
gc.enable()
