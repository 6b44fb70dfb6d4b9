"""Registries, which map names to objects or to ``"module:attribute"``, imported on first use.

Importing a registry does not import its targets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.problems.errors import failure_text
from axonlaunch.system.processes.targets import load_target

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")
F = TypeVar("F")
B = TypeVar("B", bound=Callable[..., Any])


class UnknownNameError(ValueError):
    """A name is not registered; the message lists the registered names."""


class EntryPointError(ValueError):
    """An installed package that offers a name can't be imported, or does not register the name."""


@dataclass(frozen=True)
class Needs:
    """An optional package that an entry requires.

    Attributes:
        module: Name of the module to import.
        package: Name of the package in messages.
        requirement: Argument of ``pip install``.
        oldest: Oldest version that can be used.
    """

    module: str
    package: str
    requirement: str
    oldest: tuple[int, int] = (0, 0)

    @property
    def is_missing(self) -> bool:
        """Whether the package is not installed; a folder with its name does not count."""
        spec = importlib.util.find_spec(self.module)
        return spec is None or spec.origin is None

    def problem(self) -> str:
        """Return why the package can't be used; empty if it can."""
        from importlib import metadata

        if self.is_missing:
            return str(self)
        if self.oldest == (0, 0):
            return ""
        try:
            installed = metadata.version(self.package)
        except metadata.PackageNotFoundError:  # a nightly build, under another name
            return ""
        numbers = re.findall(r"\d+", installed)[:2]  # "1.0rc1" is 1.0
        if tuple(int(number) for number in numbers) >= self.oldest:
            return ""
        oldest = ".".join(map(str, self.oldest))
        return (
            f"{self.package} {installed} is installed, and {oldest} or newer is needed; update it"
        )

    def __str__(self) -> str:
        return f"{self.package} is not installed; pip install '{self.requirement}'"


@dataclass(frozen=True)
class Entry(Generic[F]):
    """Properties of a registered name that are known before its code is imported.

    Attributes:
        target: Object, or its import path ``"module:attribute"``.
        summary: One line of description, for ``axonlaunch ls``.
        config: Dataclass with a field ``name`` that types the group of the configuration.
        facts: Properties that other packages need without importing the target.
        needs: Package that must be installed.
        arguments: Allowed keywords in ``arguments`` of the group; None allows any.
    """

    target: Any
    summary: str
    config: type | None = None
    facts: F | None = None
    needs: Needs | None = None
    arguments: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RegisteredConfig:
    """Options of a name that was registered without a dataclass."""

    name: str
    """registered name"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the class or function"""


class Registry(Generic[_T, F]):
    """A table of lazily imported objects of one kind.

    Installed packages can offer names by entry points. Only the metadata of an entry point is read
    until its name is selected. Importing the package must then register that name.

    Attributes:
        kind: Kind of the objects, ``"dataset"``; ``register_dataset`` adds one.
        entry_points: Group of entry points by which packages offer names; None if they can't.
        free_config: Dataclass for names that were registered without one; it has the fields
            ``name`` and ``arguments``.
    """

    def __init__(
        self,
        kind: str,
        entries: dict[str, Entry[F]] | None = None,
        *,
        entry_points: str | None = None,
        free_config: type = RegisteredConfig,
    ) -> None:
        self.kind = kind
        self.entry_points = entry_points
        self.free_config = free_config
        self._entries = dict(entries or {})
        self._included = frozenset(self._entries)

    def add(
        self,
        name: str,
        target: _T | str,
        *,
        summary: str,
        config: type | None = None,
        facts: F | None = None,
        arguments: tuple[str, ...] | None = None,
    ) -> None:
        """Register an object under a name.

        Args:
            name: Name that configurations use.
            target: Object, or ``"module:attribute"``, which is imported on first use.
            summary: One line of description, for ``axonlaunch ls``.
            config: Dataclass that types the group; None uses ``free_config``.
            facts: Properties that other packages need.
            arguments: Allowed keywords in ``arguments`` of a ``free_config``; None allows any.

        Raises:
            ValueError: The name is already registered for another target.
        """
        registered = self._entries.get(name)
        if registered is not None and registered.target != target:
            raise ValueError(f"{self.kind} {name!r} is registered already ({registered.summary})")
        self._entries[name] = Entry(
            target, summary, config or self.free_config, facts, arguments=arguments
        )

    def register(
        self,
        name: str,
        *,
        config: type | None = None,
        facts: F | None = None,
        summary: str | None = None,
        make_target: Callable[[Callable[..., Any]], Any] | None = None,
        passed: int = 0,
    ) -> Callable[[B], B]:
        """Return a decorator that registers a class or a function under a name.

        The decorated object is called with an instance of ``config``, or without ``config`` with
        the ``arguments`` of the group as keywords.

        Args:
            name: Name to register.
            config: Dataclass with a field ``name``; None uses ``free_config``.
            facts: Properties that other packages need.
            summary: One line of description, for ``axonlaunch ls``; None uses the first line of the
                docstring.
            make_target: Function from a builder that takes a configuration to the target; None
                registers the builder.
            passed: Number of leading parameters of the decorated object that are not arguments.

        Raises:
            TypeError: The name is not text.
            ValueError: ``config`` is not a dataclass with a field ``name``; when decorating, the
                name is already registered.
        """
        self.check_config(name, config)

        def register(builder: B) -> B:
            takes_config = builder if config else _with_arguments(builder)
            target: Any = make_target(takes_config) if make_target else takes_config
            described = summary or inspect.getdoc(builder) or f"from {builder.__module__}"
            line = described.splitlines()[0]
            is_free = config in (None, self.free_config)
            arguments = keywords_of(builder, passed=passed) if is_free else None
            self.add(name, target, summary=line, config=config, facts=facts, arguments=arguments)
            return builder

        return register

    def check_config(self, name: str, config: type | None) -> None:
        """Check that a name is text, and a configuration a dataclass with a field ``name``.

        Raises:
            TypeError: The name is not text, as if ``@register_model`` had no parentheses.
            ValueError: The configuration is not a dataclass, or has no field ``name``.
        """
        if not isinstance(name, str):
            raise TypeError(f'register_{self.kind} needs a name: @ax.register_{self.kind}("name")')
        fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
        if config is not None and "name" not in [field.name for field in fields]:
            raise ValueError(
                f"register_{self.kind}({name!r}, config={config.__name__}): it is not a dataclass "
                f'with a field name; write name: str = "{name}" in one'
            )

    def get(self, name: str) -> _T:
        """Import and return the target of a name.

        Raises:
            UnknownNameError: The name is not registered.
            EntryPointError: The package that offers it can't be imported.
        """
        target = self.entry(name).target
        return cast("_T", load_target(target) if isinstance(target, str) else target)

    def config(self, name: str) -> type:
        """Return the dataclass that types the group if this name is selected.

        Raises:
            UnknownNameError: The name is not registered.
            EntryPointError: The package that offers it can't be imported.
        """
        config = self.entry(name).config
        assert config is not None, f"{self.kind} {name!r} has no configuration"
        return config

    def facts(self, name: str) -> F:
        """Return the facts of a name.

        Raises:
            UnknownNameError: The name is not registered.
            EntryPointError: The package that offers it can't be imported.
        """
        return cast("F", self.entry(name).facts)

    def entry(self, name: str) -> Entry[F]:
        """Return the entry of a name; import the package that offers it if it is not registered.

        Raises:
            UnknownNameError: The name is not registered.
            EntryPointError: The package that offers it can't be imported.
        """
        if name not in self._entries:
            points = self.offers(name)
            if not points:
                raise UnknownNameError(unknown(self.kind, name, self.names()))
            self._import_offer(name, points)
        return self._entries[name]

    def offers(self, name: str | None = None) -> list[EntryPoint]:
        """Return the entry points of installed packages for one name, or all; import nothing."""
        if self.entry_points is None:
            return []
        from importlib import metadata  # takes 10 ms, and few runs need it

        points = metadata.entry_points(group=self.entry_points)
        if name is not None:
            points = points.select(name=name)
        # A package that is installed twice, editable and from a wheel, has each entry point twice.
        return sorted({(point.name, point.value): point for point in points}.values())

    def configs(self) -> dict[str, type]:
        """Return ``{name: dataclass}`` of registered names, without those only offered."""
        return {name: entry.config for name, entry in self._entries.items() if entry.config}

    def known_facts(self) -> dict[str, F]:
        """Return ``{name: facts}`` of registered names, without those only offered."""
        return {n: entry.facts for n, entry in self._entries.items() if entry.facts is not None}

    def names(self) -> list[str]:
        """Return all names, sorted, including those that installed packages offer."""
        return sorted({*self._entries, *(point.name for point in self.offers())})

    def summaries(self) -> dict[str, str]:
        """Return ``{name: summary}``, sorted by name; for an offered name, its package."""
        lines = {name: entry.summary for name, entry in self._entries.items()}
        for point in self.offers():
            target = self._entries[point.name].target if point.name in lines else None
            module = point.value.partition(":")[0]
            if target is None:
                lines[point.name] = f"from {_package(point)}"
            elif isinstance(target, str) and target.partition(":")[0] != module:
                warnings.warn(
                    f"{_package(point)} is passed over where it offers {point.name} = "
                    f"{point.value}: {point.name} is an included {self.kind}",
                    stacklevel=2,
                )
        return dict(sorted(lines.items()))

    def __contains__(self, name: object) -> bool:
        return name in self._entries or bool(isinstance(name, str) and self.offers(name))

    def is_included(self, name: str) -> bool:
        """Return whether a name belongs to the included entries."""
        return name in self._included

    def is_registered(self, name: str) -> bool:
        """Return whether a name is registered; names that packages only offer are not."""
        return name in self._entries

    def _import_offer(self, name: str, points: list[EntryPoint]) -> None:
        """Import the one package that offers a name.

        Raises:
            EntryPointError: Several packages offer the name, or the package can't be imported or
                does not register the name.
        """
        offered = " and ".join(f"{_package(p)} (entry point {name} = {p.value})" for p in points)
        if len(points) > 1:
            raise EntryPointError(f"it is offered by {offered}; keep only one of them installed")
        try:
            # Text that a module prints during import must not mix with the output of the command.
            with contextlib.redirect_stdout(sys.stderr):
                points[0].load()
        except (Exception, SystemExit) as error:  # foreign code can fail in any way
            reason = f"importing it failed with {failure_text(error)}"
            raise EntryPointError(f"it is offered by {offered}; {reason}") from error
        if name not in self._entries:
            raise EntryPointError(
                f"it is offered by {offered}, which registers no {self.kind} {name!r}; "
                f'decorate it with @register_{self.kind}("{name}")'
            )


def keywords_of(builder: Callable[..., Any], *, passed: int = 0) -> tuple[str, ...] | None:
    """Return the keywords of a function or class except the first ``passed``; None if any."""
    try:
        parameters = [*inspect.signature(builder).parameters.values()]
    except (ValueError, TypeError):
        return None  # some objects written in C have no signature
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters[passed:] if p.kind in named)


def _with_arguments(builder: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that calls a builder with the ``arguments`` of a configuration."""

    def build(config: Any) -> Any:
        return builder(**config.arguments)

    return build


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an installed package"
