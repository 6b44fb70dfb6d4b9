"""Defers the import of torch's compiler (``torch._dynamo``) until something compiles.

The compiler takes a fifth to a third of the fork server's import time. Eager training calls four of
its functions: two exclude an optimizer or a hook from compilation, one returns a mode and one
clears a cache. They have no effect until the compiler is imported, so ``defer_compiler`` replaces
these four by equivalents. The settings (``torch._dynamo.config``), which fake tensors read, are
torch's module, imported without the rest. Any other use of ``torch._dynamo`` (``torch.compile``, a
pipeline's schedules) imports the real module into the same module object, which then behaves like
torch's.

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
    """Defer the import of ``torch._dynamo`` in this process until more than eager training uses it.

    Call this before the first import of ``torch._dynamo``; later it has no effect.
    """
    if _NAME in sys.modules:
        return
    spec = PathFinder.find_spec(_NAME, torch.__path__)
    if spec is None or type(spec.loader) is not SourceFileLoader:
        return  # torch is not installed as source files, so its import is not changed
    compiler = _DeferredCompiler(spec)
    sys.meta_path.insert(0, _Finder(compiler))
    sys.modules[_NAME] = compiler
    torch._dynamo = compiler


def is_deferred() -> bool:
    """Return whether ``torch._dynamo`` is deferred and not yet imported in this process."""
    module = sys.modules.get(_NAME)
    return isinstance(module, _DeferredCompiler) and module.is_deferred


class _DeferredCompiler(ModuleType):
    """Replaces ``torch._dynamo`` until an attribute is read that eager training does not use."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        # Tools such as inspect and warnings read these attributes of every module.
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
        """Whether the real module is not yet imported."""
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
        """Import the real module before one of its attributes is replaced."""
        if self.__dict__.get("_is_deferred") and not name.startswith("_") and name != "config":
            self.load()
        super().__setattr__(name, value)

    def load(self) -> None:
        """Import the real module into this object, or wait for another thread that does."""
        with self._lock:
            first, self._is_deferred = self._is_deferred, False
            if first:
                del sys.modules[_NAME]
        # Python's import locks make other threads wait, and detect deadlocks.
        importlib.import_module(_NAME)


class _DeferredPart:
    """A module of ``torch._dynamo`` with one equivalent; other attributes import the real one."""

    def __init__(
        self, compiler: _DeferredCompiler, name: str, equivalents: Mapping[str, Any]
    ) -> None:
        self.__dict__.update(equivalents, _compiler=compiler, _name=name)

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
    """Imports the real package into its deferred object before any of its modules."""

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
            if (module := sys.modules.get(fullname)) is not None:  # imported by the package
                # With the module's own specification, Python would run it again.
                module.__spec__ = ModuleSpec(fullname, _AlreadyImported(module))
                return module.__spec__
        return None


class _InPlace(SourceFileLoader):
    """Runs the code of a module in an existing module object."""

    module: ModuleType

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the existing object."""
        del spec
        return self.module


class _AlreadyImported(Loader):
    """Returns a module that was imported while its import was being prepared."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the imported module."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's specification without running its code."""
        module.__spec__ = self._spec


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Return a function that calls ``fn`` and is excluded from compilation."""
    if not isinstance(fn, FunctionType):  # a class, a module, or the use as ``@disable()``
        return _real_disable()(fn, recursive, **options)
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        nonlocal disabled
        if sys.modules[_NAME].__dict__.get("disable") is _disable:  # the compiler is not imported
            return fn(*args, **keywords)
        if disabled is None:
            disabled = _real_disable()(fn, recursive, **options)
        return disabled(*args, **keywords)

    return call


def _real_disable() -> Callable[..., Any]:
    disable: Callable[..., Any] = importlib.import_module(f"{_NAME}.decorators").disable
    return disable


def _graph_break(msg: str = "") -> None:
    """Do nothing, like torch's function outside of a compilation."""


def _ddp_mode() -> str:
    """Return the mode in which torch compiles DDP, from the current setting."""
    if importlib.import_module(_CONFIG).optimize_ddp is True:
        return "ddp_optimizer"
    real: Any = importlib.import_module(f"{_NAME}.utils")
    mode: str = real.get_optimize_ddp_mode()
    return mode


def _clear_cache() -> None:
    """Do nothing, because there is no cache before the compiler is imported."""
