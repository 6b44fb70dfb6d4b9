"""Eager training runs without importing torch's compiler, with bitwise equal results.

``axonlaunch/launch/local/torch_internals.py`` has equivalents of four functions of
``torch._dynamo``. The first tests compare them with torch's functions: if one fails after an update
of torch, change that file.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch._dynamo.config
import torch._dynamo.decorators

from axonlaunch.launch.local import torch_internals


def test_torch_graph_break_has_no_effect_outside_compilation() -> None:
    body = inspect.getsource(torch._dynamo.decorators.graph_break).partition(":\n")[2]
    assert body.strip().strip('"') == "Force a graph break"
    assert [*inspect.signature(torch._dynamo.decorators.graph_break).parameters] == ["msg"]


def test_torch_compiler_disable_has_expected_signature() -> None:
    taken = inspect.signature(torch._dynamo.decorators.disable).parameters.values()
    named = {parameter.name for parameter in taken if parameter.kind is parameter.KEYWORD_ONLY}
    assert [parameter.name for parameter in taken][:2] == ["fn", "recursive"]
    assert named == {"reason", "wrapping"}


def test_torch_dynamo_ddp_setting_equals_deferred_value() -> None:
    config = torch._dynamo.config
    with torch._dynamo.config.patch(optimize_ddp=config._config["optimize_ddp"].default):
        assert torch._dynamo.utils.get_optimize_ddp_mode() == torch_internals._ddp_mode()


def test_compiler_is_not_deferred_after_import() -> None:
    compiler = torch._dynamo
    torch_internals.defer_compiler()
    assert sys.modules["torch._dynamo"] is compiler
    assert not torch_internals.is_deferred()


def run(text: str, *, warnings: str = "error") -> str:
    """Run a program in a new interpreter; return its output."""
    head = "import torch\nfrom axonlaunch.launch.local.torch_internals import *\n"
    program = [sys.executable, "-W", warnings, "-c", head + textwrap.dedent(text)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAINING = """
import hashlib, os, sys
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
if sys.argv[1:] != ["imported"]:
    defer_compiler()
else:
    import torch._dynamo
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
digest = hashlib.sha256()
for wrap in (lambda module: module, nn.parallel.DistributedDataParallel, fully_shard):
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            inputs = torch.randn(4, 8)
            loss = checkpoint(model, inputs, use_reentrant=False).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            digest.update(loss.detach().numpy().tobytes())
        optimizer.load_state_dict(optimizer.state_dict())
        for parameter in model.parameters():
            whole = getattr(parameter, "full_tensor", lambda tensor=parameter: tensor)()
            digest.update(whole.detach().numpy().tobytes())
print(digest.hexdigest(), "torch._dynamo.eval_frame" in sys.modules)
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_eager_training_computes_the_same_bits_with_a_deferred_compiler_and_never_imports_it() -> (
    None
):
    """Plain, DDP and FSDP, with recomputation, two optimizers and their states."""
    deferred, imported = run(TRAINING), run(f"import sys; sys.argv.append('imported')\n{TRAINING}")
    assert deferred.split() == [imported.split()[0], "False"]
    assert imported.split()[1] == "True"


@pytest.mark.processes
def test_a_deferred_compiler_compiles_as_ever_when_it_is_used() -> None:
    """Compiles after eager steps that ran without the compiler; in place, each module once."""
    printed = run(
        """
        import inspect, sys
        defer_compiler()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        inspect.getmodule(model.forward)  # reads attributes of every module
        before = sys.modules["torch._dynamo"]
        print(is_deferred())
        import torch._dynamo.config as config  # alone, as fake tensors do
        print(is_deferred())
        import torch._dynamo.eval_frame as frames  # with the package, which imports it too
        print(is_deferred(), torch._dynamo is before, sys.modules["torch._dynamo"] is before)
        print(config is torch._dynamo.config, config is sys.modules["torch._dynamo.config"])
        print(frames is torch._dynamo.eval_frame, frames.__spec__.origin == frames.__file__)
        print(frames.OptimizedModule is torch._dynamo.OptimizedModule)  # was run once
        print(torch._dynamo.utils is sys.modules["torch._dynamo.utils"])
        print(torch._dynamo.disable is torch._dynamo.decorators.disable)
        from torch._dynamo.testing import CompileCounter
        counter = CompileCounter()
        compiled = torch.compile(lambda x: torch.sin(x) + 1, backend=counter)
        assert torch.equal(compiled(torch.ones(3)), torch.sin(torch.ones(3)) + 1)
        optimizer.step()
        optimizer.zero_grad()
        print(counter.frame_count)
        def breaks(x):
            optimizer.zero_grad()  # called before the import, and still not compiled
            return x + 1
        torch.compile(breaks, backend=counter)(torch.ones(3))
        print(counter.frame_count)
        """,
        warnings="default",
    )
    assert printed.split() == ["True", "True", "False", *["True"] * 9, "1", "2"]


@pytest.mark.processes
def test_other_uses_of_deferred_compiler_import_it() -> None:
    """One interpreter, forked for each use: reading another name, a setting, a class."""
    printed = run(
        """
        import os, sys
        defer_compiler()

        def attribute():
            assert not hasattr(torch._dynamo, "__wrapped__") and is_deferred()
            assert torch._dynamo.utils.counters is not None and not is_deferred()
            assert not hasattr(torch._dynamo, "no_such_name")

        def setting():
            torch._dynamo.config.optimize_ddp = False
            assert is_deferred()
            assert torch._dynamo.utils.get_optimize_ddp_mode() == "no_optimization"
            assert torch._dynamo.utils.config.optimize_ddp is False and not is_deferred()

        def module():
            wrapped = torch._dynamo.disable(torch.nn.Linear(2, 2))
            assert wrapped(torch.ones(1, 2)).shape == (1, 2) and not is_deferred()

        def replaced():
            torch._dynamo.reset = len
            assert torch._dynamo.reset is len and not is_deferred()

        for use in (attribute, setting, module, replaced):
            if (child := os.fork()) == 0:
                try:
                    use()
                    os._exit(0)
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            print(use.__name__, os.waitpid(child, 0)[1])
        """,
        warnings="default",
    )
    assert printed.split() == ["attribute", "0", "setting", "0", "module", "0", "replaced", "0"]


@pytest.mark.processes
def test_the_fork_server_of_an_eager_run_has_not_imported_the_compiler() -> None:
    printed = run(
        """
        import sys
        import axonlaunch.launch.local.preload
        print(is_deferred(), "torch.distributed.pipelining" in sys.modules)
        import axonlaunch.planning.tracing.preload
        print(is_deferred(), "torch.distributed.pipelining" in sys.modules)
        """,
        warnings="default",
    )
    assert printed.split() == ["True", "False", "False", "True"]
