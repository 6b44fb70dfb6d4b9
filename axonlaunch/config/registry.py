"""Names that stand for code: a name maps to ``"module:attribute"``, imported on first use.

It knows nothing of what it holds; importing a registry never imports what it lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from axonlaunch.config.did_you_mean import unknown
from axonlaunch.config.errors import failure_text
from axonlaunch.system.targets import load_target

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")
F = TypeVar("F")
B = TypeVar("B", bound=Callable[..., Any])


class UnknownNameError(ValueError):
    """A name that the registry does not list; the message lists those that it does."""


class EntryPointError(ValueError):
    """An installed package offers a name and can't be imported, or does not register it."""


@dataclass(frozen=True)
class Needs:
    """A package that an entry does not work without, and that need not be installed.

    Attributes:
        module: What is imported of it.
        package: Its name, as people write it.
        requirement: What to ``pip install``.
    """

    module: str
    package: str
    requirement: str

    @property
    def is_missing(self) -> bool:
        """Whether it is not installed; a folder that is only named like it does not count."""
        spec = importlib.util.find_spec(self.module)
        return spec is None or spec.origin is None

    def __str__(self) -> str:
        return f"{self.package} is not installed; pip install '{self.requirement}'"


@dataclass(frozen=True)
class Entry(Generic[F]):
    """What a registry knows about a name before its code is imported.

    Attributes:
        target: The object itself, or where to import it from as ``"module:attribute"``.
        summary: One line that says what it is, for ``axonlaunch ls``.
        config: Dataclass with a field ``name`` that types its group of the configuration.
        facts: What others must know of it and can't ask the target.
        needs: What has to be installed for it.
        arguments: Keywords that ``arguments`` of the group may have; None: any.
    """

    target: Any
    summary: str
    config: type | None = None
    facts: F | None = None
    needs: Needs | None = None
    arguments: tuple[str, ...] | None = None


class Registry(Generic[_T, F]):
    """A table of lazily imported things of one kind.

    An installed package offers a name by an entry point, whose metadata alone is read until the
    name is chosen. Importing it must register that name.

    Attributes:
        kind: What the things are, ``"dataset"``; ``register_dataset`` adds one.
        entry_points: Group of entry points that packages offer names in; None: they can't.
        free_config: Dataclass with ``name`` and ``arguments`` for an entry that brings none.
    """

    def __init__(
        self,
        kind: str,
        entries: dict[str, Entry[F]] | None = None,
        *,
        entry_points: str | None = None,
        free_config: type | None = None,
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
        """List a thing under a name.

        Args:
            name: As configurations choose it.
            target: The thing, or ``"module:attribute"``, imported on first use.
            summary: One line for ``axonlaunch ls``.
            config: Dataclass that types its group; None: ``free_config``.
            facts: What others must know of it.
            arguments: Keywords that ``arguments`` of a ``free_config`` may have; None: any.

        Raises:
            ValueError: The name is taken by something else.
        """
        known = self._entries.get(name)
        if known is not None and known.target != target:
            raise ValueError(f"{self.kind} {name!r} is registered already ({known.summary})")
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
        """Return the decorator that lists a class or a function under a name.

        What is decorated is called with one of ``config``; without it, with the ``arguments`` of
        the group as keywords.

        Args:
            name: The name.
            config: Dataclass with a field ``name``; None: ``free_config``.
            facts: What others must know of it.
            summary: One line for ``axonlaunch ls``; None: the docstring's first.
            make_target: From what takes a configuration to what is listed; None: itself.
            passed: How many parameters of what is decorated come first and are no arguments.

        Raises:
            ValueError: The configuration is no dataclass with a name; when decorating, that the
                name is taken.
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
        """Refuse what is no dataclass with a name.

        Raises:
            ValueError: It is none.
        """
        fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
        if config is not None and "name" not in [field.name for field in fields]:
            raise ValueError(
                f"register_{self.kind}({name!r}, config={config.__name__}): it is not a dataclass "
                f'with a field name; write name: str = "{name}" in one'
            )

    def get(self, name: str) -> _T:
        """Import and return what a name stands for.

        Raises:
            UnknownNameError: The name is not listed.
            EntryPointError: The package that offers it can't be imported.
        """
        target = self.entry(name).target
        return cast("_T", load_target(target) if isinstance(target, str) else target)

    def config(self, name: str) -> type:
        """Return the dataclass that types the group where this name is chosen.

        Raises:
            UnknownNameError: The name is not listed.
            EntryPointError: The package that offers it can't be imported.
        """
        config = self.entry(name).config
        assert config is not None, f"{self.kind} {name!r} has no configuration"
        return config

    def facts(self, name: str) -> F:
        """Return what others must know of what a name stands for.

        Raises:
            UnknownNameError: The name is not listed.
            EntryPointError: The package that offers it can't be imported.
        """
        return cast("F", self.entry(name).facts)

    def entry(self, name: str) -> Entry[F]:
        """Return all that is known of a name, importing the package that offers it if one does.

        Raises:
            UnknownNameError: The name is not listed.
            EntryPointError: The package that offers it can't be imported.
        """
        if name not in self._entries:
            points = self.offers(name)
            if not points:
                raise UnknownNameError(unknown(self.kind, name, self.names()))
            self._import_offer(name, points)
        return self._entries[name]

    def offers(self, name: str | None = None) -> list[EntryPoint]:
        """Return the entry points of installed packages, of one name or all; imports nothing."""
        if self.entry_points is None:
            return []
        from importlib import metadata  # takes 10 ms, and few runs use what others offer

        points = metadata.entry_points(group=self.entry_points)
        if name is not None:
            points = points.select(name=name)
        # A package that is installed twice, in place and from a wheel, offers the same twice.
        return sorted({(point.name, point.value): point for point in points}.values())

    def configs(self) -> dict[str, type]:
        """Return ``{name: its dataclass}`` of what is registered; what packages offer is not."""
        return {name: entry.config for name, entry in self._entries.items() if entry.config}

    def known_facts(self) -> dict[str, F]:
        """Return ``{name: facts}`` of what is registered; what packages offer is not."""
        return {n: entry.facts for n, entry in self._entries.items() if entry.facts is not None}

    def names(self) -> list[str]:
        """Return the listed names, those that installed packages offer among them, sorted."""
        return sorted({*self._entries, *(point.name for point in self.offers())})

    def summaries(self) -> dict[str, str]:
        """Return ``{name: summary}``, sorted by name; of an offered one the package that does."""
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
        """Say whether a name is in the table as it was made, and nobody else's."""
        return name in self._included

    def is_registered(self, name: str) -> bool:
        """Say whether a name is known without importing a package that offers it."""
        return name in self._entries

    def _import_offer(self, name: str, points: list[EntryPoint]) -> None:
        """Import the one package that offers a name.

        Raises:
            EntryPointError: Several offer it, it can't be imported, or registers another name.
        """
        offered = " and ".join(f"{_package(p)} (entry point {name} = {p.value})" for p in points)
        if len(points) > 1:
            raise EntryPointError(f"it is offered by {offered}; uninstall all but one")
        try:
            # What a module prints while it is imported must not mix with a command's output.
            with contextlib.redirect_stdout(sys.stderr):
                points[0].load()
        except (Exception, SystemExit) as error:  # someone else's package may fail in any way
            reason = f"importing it failed with {failure_text(error)}"
            raise EntryPointError(f"it is offered by {offered}; {reason}") from error
        if name not in self._entries:
            raise EntryPointError(
                f"it is offered by {offered}, which registers no {self.kind} {name!r}; "
                f'decorate it with @register_{self.kind}("{name}")'
            )


def keywords_of(builder: Callable[..., Any], *, passed: int = 0) -> tuple[str, ...] | None:
    """Return the keywords that a function or class takes, but for the first ones; None: any."""
    try:
        parameters = [*inspect.signature(builder).parameters.values()]
    except (ValueError, TypeError):
        return None  # some of what is written in C has no signature
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters[passed:] if p.kind in named)


def _with_arguments(builder: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what calls a builder with the ``arguments`` of a configuration as keywords."""

    def build(config: Any) -> Any:
        return builder(**config.arguments)

    return build


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an installed package"
