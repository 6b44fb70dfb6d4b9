"""Defers the import of torch's compiler (``torch._dynamo``) until something compiles.

Importing it takes a fifth to a third of what the fork server imports. Eager training calls four of
its functions: two keep the compiler out of an optimizer or a hook, two ask for a mode and clear a
cache. None has an effect while the compiler was never imported, so ``defer_compiler`` replaces
these four by equivalents. Its settings (``torch._dynamo.config``), which fake tensors
read, are torch's own module, imported alone. Any other use of ``torch._dynamo`` (``torch.compile``,
a pipeline's schedules) imports the real module into the same module object; from then on all is as
torch has it.

``tests/launch/test_deferred_compiler.py`` compares the four with those of the installed torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"


def defer_compiler() -> None:
    """Import ``torch._dynamo`` in this process only when more than eager training uses it.

    Call it before the first import of ``torch._dynamo``; later it does nothing.
    """
    if _NAME in sys.modules:
        return
    spec = PathFinder.find_spec(_NAME, torch.__path__)
    if spec is None or type(spec.loader) is not SourceFileLoader:
        return  # a torch that is not installed as files is imported as it always was
    compiler = _DeferredCompiler(spec)
    sys.meta_path.insert(0, _Finder(compiler))
    sys.modules[_NAME] = compiler
    torch._dynamo = compiler


def is_deferred() -> bool:
    """Whether ``torch._dynamo`` is deferred in this process and was not imported since."""
    module = sys.modules.get(_NAME)
    return isinstance(module, _DeferredCompiler) and module.is_deferred


class _DeferredCompiler(ModuleType):
    """``torch._dynamo`` with what eager training uses, until another attribute of it is read."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        # What tools read of every module (inspect, warnings) must not import it.
        self.__spec__, self.__file__, self.__loader__ = spec, spec.origin, spec.loader
        self.__package__, self.__path__ = _NAME, spec.submodule_search_locations or []
        self._lock = threading.Lock()
        self.disable = _disable
        self.graph_break = _graph_break
        self.utils = _DeferredPart(self, "utils", {"get_optimize_ddp_mode": _ddp_mode})
        self.trace_rules = _DeferredPart(self, "trace_rules", {"clear_lru_cache": _clear_cache})
        self._is_deferred = True

    @property
    def is_deferred(self) -> bool:
        """Whether nothing has imported it yet."""
        return self._is_deferred

    def __getattr__(self, name: str) -> Any:
        """Import the real module for an attribute that eager training does not use."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "config":
            return importlib.import_module(_CONFIG)
        self.load()
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Import the real module before something is replaced in it."""
        if self.__dict__.get("_is_deferred") and not name.startswith("_") and name != "config":
            self.load()
        super().__setattr__(name, value)

    def load(self) -> None:
        """Import the real module into this object, or wait until another thread has."""
        with self._lock:
            first, self._is_deferred = self._is_deferred, False
            if first:
                del sys.modules[_NAME]
        # Python's own import: its locks make other threads wait, and it finds a deadlock of two.
        importlib.import_module(_NAME)


class _DeferredPart:
    """A module of ``torch._dynamo`` with one equivalent; other attributes import the real one."""

    def __init__(self, compiler: _DeferredCompiler, name: str, known: Mapping[str, Any]) -> None:
        self.__dict__.update(known, _compiler=compiler, _name=name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self._real(), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self._real(), attribute, value)

    def _real(self) -> ModuleType:
        self._compiler.load()
        return importlib.import_module(f"{_NAME}.{self._name}")


class _Finder(MetaPathFinder):
    """Imports the whole package before one of its modules, into the object that stands for it."""

    def __init__(self, compiler: _DeferredCompiler) -> None:
        self._compiler = compiler

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if fullname == _NAME:
            spec = PathFinder.find_spec(fullname, path)
            assert spec is not None
            assert spec.origin is not None
            spec.loader = _InPlace(fullname, spec.origin)
            spec.loader.module = self._compiler
            return spec
        if not fullname.startswith(f"{_NAME}.") or fullname == _CONFIG:
            return None
        if self._compiler.is_deferred:
            self._compiler.load()
            if (module := sys.modules.get(fullname)) is not None:  # the package imports it too
                # Python would run it again, by the specification that the module has.
                module.__spec__ = ModuleSpec(fullname, _AlreadyImported(module))
                return module.__spec__
        return None


class _InPlace(SourceFileLoader):
    """Runs the code of a module in an object that exists."""

    module: ModuleType

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the object."""
        del spec
        return self.module


class _AlreadyImported(Loader):
    """Returns a module that was imported while its own import was prepared."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return it."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it was."""
        module.__spec__ = self._spec


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Return a function that calls ``fn``, and that the compiler, once imported, passes over."""
    if not isinstance(fn, FunctionType):  # a class, a module, or the use as ``@disable()``
        return _real_disable()(fn, recursive, **options)
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        nonlocal disabled
        if sys.modules[_NAME].__dict__.get("disable") is _disable:  # nothing can compile yet
            return fn(*args, **keywords)
        if disabled is None:
            disabled = _real_disable()(fn, recursive, **options)
        return disabled(*args, **keywords)

    return call


def _real_disable() -> Callable[..., Any]:
    disable: Callable[..., Any] = importlib.import_module(f"{_NAME}.decorators").disable
    return disable


def _graph_break(msg: str = "") -> None:
    """Do nothing, as torch's function does outside a compilation."""


def _ddp_mode() -> str:
    """Return how torch compiles DDP, by its setting as it stands."""
    if importlib.import_module(_CONFIG).optimize_ddp is True:
        return "ddp_optimizer"
    real: Any = importlib.import_module(f"{_NAME}.utils")
    named: str = real.get_optimize_ddp_mode()
    return named


def _clear_cache() -> None:
    """Do nothing: rules of the compiler are cached when it is imported."""
