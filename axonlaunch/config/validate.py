"""Turns a plain tree of values into the typed tree, and says everything that is wrong with it.

It refuses what it can't convert without guessing: no text for a number, no fraction for a count.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from axonlaunch.config.did_you_mean import nearest, unknown
from axonlaunch.config.errors import ConfigIssue, one_of, plain
from axonlaunch.config.group_options import typed_groups
from axonlaunch.config.other_names import FOREIGN_NAMES, RENAMED_KEYS
from axonlaunch.config.registry import EntryPointError, Registry

_ELSEWHERE = 0.75
"""How like a key of another group a name must be: ``stepz`` is meant for ``train.steps`` (0.8), and
``epochs`` for ``optimizer.eps`` (0.67) is not."""


class _Rejected(Exception):  # noqa: N818 - control flow inside this module, never seen outside
    """A value that does not fit; the text says what would."""


@dataclass
class Validation:
    """The typed tree as far as it goes (defaults stand in for what is wrong) and the problems."""

    config: Any
    problems: list[ConfigIssue] = field(default_factory=list)


def validate(tree: dict[str, Any], schema: type) -> Validation:
    """Type a plain tree by a dataclass; collect every problem rather than stop at the first."""
    problems: list[ConfigIssue] = []
    config = _dataclass(tree, schema, "", problems, root=schema)
    return Validation(config, problems)


def _dataclass(
    tree: Any, schema: type, prefix: str, problems: list[ConfigIssue], *, root: type
) -> Any:
    if not isinstance(tree, dict):
        message = f"is a group of keys; set one of them, as in {prefix}.{_first_key(schema)}=..."
        problems.append(ConfigIssue(prefix, message, tree))
        tree = {}
    hints = typing.get_type_hints(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    problems += [
        _unknown_key(prefix, str(key), value, fields, root)
        for key, value in tree.items()
        if key not in fields
    ]
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        key = f"{prefix}.{name}" if prefix else name
        if "typed_by" in spec.metadata:
            sibling = spec.metadata["typed_by"]
            registry = fields[sibling].metadata["names"]
            chosen = values.get(sibling)
            values[name] = _options(tree.get(name), registry, chosen, key, problems, root)
            continue
        if name not in tree:
            if spec.default is MISSING and spec.default_factory is MISSING:
                problems.append(ConfigIssue(key, f"is missing; write {key}=..."))
            continue
        value = tree[name]
        if value == "???":
            problems.append(ConfigIssue(key, f"is missing; write {key}=..."))
            continue
        variants = spec.metadata.get("variants")
        if "each" in spec.metadata:
            values[name] = _each(value, spec.metadata["each"], key, problems, root)
        elif (of_a_group := spec.metadata.get("groups")) is not None:
            values[name] = typed_groups(
                value, schema, of_a_group, tree, key, problems, type_one=_dataclass
            )
        elif variants is not None:
            values[name] = _variant(value, variants, spec, key, problems, root)
        elif (nested := _nested(hints[name], value)) is not None:
            values[name] = _dataclass(value, nested, key, problems, root=root)
        else:
            try:
                values[name] = _convert(value, hints[name])
                _is_named(values[name], spec.metadata.get("names"))
                _in_range(values[name], spec.metadata, or_null=type(None) in get_args(hints[name]))
            except _Rejected as reason:
                values.pop(name, None)
                words = spec.metadata.get("words")
                message = f"expected {words}" if words else str(reason)
                problems.append(ConfigIssue(key, message, value))
    config = _construct(schema, values, fields)
    broken = {problem.key for problem in problems}
    for name, message in getattr(config, "problems", list)():
        key = f"{prefix}.{name}" if prefix else name
        if key not in broken:
            problems.append(ConfigIssue(key, message, getattr(config, name, None)))
    return config


def _construct(schema: type, values: dict[str, Any], fields: dict[str, Any]) -> Any:
    """Build the dataclass; a required field that is missing (reported already) is None."""
    for name, spec in fields.items():
        if name not in values and spec.default is MISSING and spec.default_factory is MISSING:
            values[name] = None
    return schema(**values)


def _variant(
    tree: Any,
    variants: Registry[Any, Any],
    spec: Any,
    key: str,
    problems: list[ConfigIssue],
    root: type,
) -> Any:
    """Type a subtree by the dataclass that its ``name`` stands for."""
    if not isinstance(tree, dict):
        message = f"is a group; choose one with {key}=NAME: {one_of(variants.names())}"
        problems.append(ConfigIssue(key, message, tree))
        return _default(spec)
    name = tree.get("name", getattr(_default(spec), "name", None))
    if not isinstance(name, str) or name not in variants:
        what = variants.kind if spec is None else key
        message = unknown(what, plain(name), variants.names())
        problems.append(ConfigIssue(f"{key}.name", message, name))
        return _default(spec)
    try:
        schema = variants.config(name)
    except EntryPointError as error:
        problems.append(ConfigIssue(f"{key}.name", str(error), name))
        return _default(spec)
    return _dataclass(tree, schema, key, problems, root=root)


def _options(
    tree: Any,
    variants: Registry[Any, Any],
    name: str | None,
    key: str,
    problems: list[ConfigIssue],
    root: type,
) -> Any:
    """Type the options of what another field names; None where that has none."""
    schema = None if name is None else variants.entry(name).config
    if schema is not None:
        named = {"name": name, **(tree or {})} if isinstance(tree, dict | None) else tree
        return _dataclass(named, schema, key, problems, root=root)
    if tree:
        message = f"{plain(name)} has no options; remove this setting"
        problems.append(ConfigIssue(key, message, tree))
    return None


def _is_named(value: Any, registry: Registry[Any, Any] | None) -> None:
    """Refuse a name that a registry does not list, or can't import.

    Raises:
        _Rejected: It says why.
    """
    if registry is None or value is None:
        return
    if value not in registry:
        close = nearest(value, registry.names())
        meant = f"did you mean {close}? " if close else ""
        raise _Rejected(f"{meant}use {one_of(registry.names())}; or null")
    try:
        registry.entry(value)
    except EntryPointError as error:
        raise _Rejected(str(error)) from error


def _each(
    tree: Any, variants: Registry[Any, Any], key: str, problems: list[ConfigIssue], root: type
) -> list[Any]:
    """Type a list of which each item is a name, a group with one, or a group with a target."""
    if not isinstance(tree, list):
        example = plain(tree) if isinstance(tree, str) else variants.names()[0]
        problems.append(ConfigIssue(key, f"expected a list; write {key}=[{example}]", tree))
        return []
    typed = []
    for number, item in enumerate(tree):
        group = {"name": item} if isinstance(item, str) else item
        if isinstance(group, dict) and "target" in group:
            group = {"name": "custom", **group}
        one = _variant(group, variants, None, f"{key}[{number}]", problems, root)
        typed += [] if one is None else [one]
    return typed


def _default(spec: Any) -> Any:
    """Return a field's default; an item of a list has none."""
    if spec is None:
        return None
    return spec.default_factory() if spec.default is MISSING else spec.default


def _nested(hint: Any, value: Any) -> type | None:
    """Return the dataclass that a hint names, unless the value is the null that it allows."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    if not found or (value is None and type(None) in options):
        return None
    return typing.cast("type", found[0])


def _convert(value: Any, hint: Any) -> Any:
    """Return the value as the hint's type.

    Raises:
        _Rejected: It can't be one; the text says what was expected.
    """
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(value, get_args(hint))
    if origin is Literal:
        return _literal(value, get_args(hint))
    if origin is list:
        return [_convert(item, get_args(hint)[0]) for item in _items(value)]
    if origin is tuple:
        return _tuple(value, get_args(hint))
    if origin is dict:
        if not isinstance(value, dict):
            raise _Rejected("expected keys with values, as in {key: value}")
        return {str(key): _convert(item, get_args(hint)[1]) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        raise _Rejected("expected a group's option")
    return _scalar(value, hint)


def _scalar(value: Any, hint: Any) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise _Rejected("expected true or false")
    if hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            raise _Rejected(f"expected a whole number; write {int(value)}")
        raise _Rejected("expected a whole number")
    if hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise _Rejected("expected a finite number")
            return float(value)
        raise _Rejected("expected a number")
    if hint is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise _Rejected("expected text")
    raise AssertionError(f"the schema uses a type that validate does not know: {hint}")


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    close = nearest(str(value), map(str, choices))
    meant = f"did you mean {close}? " if close else ""
    raise _Rejected(f"{meant}use {one_of(choices)}")


def _union(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and type(None) in options:
        return None
    reasons = []
    for option in options:
        if option is type(None):
            reasons.append("null")
            continue
        try:
            return _convert(value, option)
        except _Rejected as reason:
            reasons.append(str(reason))
            if get_origin(option) is Literal and len(get_args(option)) > 1:
                raise _Rejected(f"{reason}; or null") from None
    words = [r.removeprefix("expected ").removeprefix("use ") for r in reasons]
    raise _Rejected("expected " + " or ".join(words))


def _items(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    raise _Rejected("expected a list, as in [a,b]")


def _tuple(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    items = _items(value)
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(_convert(item, hints[0]) for item in items)
    if len(items) != len(hints):
        raise _Rejected(f"expected {len(hints)} values, got {len(items)}")
    return tuple(_convert(item, hint) for item, hint in zip(items, hints, strict=True))


def _in_range(value: Any, limits: typing.Mapping[str, Any], *, or_null: bool) -> None:
    tail = ", or null" if or_null else ""
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if "min" in limits and number < limits["min"]:
            raise _Rejected(f"must be at least {limits['min']}{tail}")
        if "above" in limits and number <= limits["above"]:
            raise _Rejected(f"must be above {limits['above']}{tail}")
        if "max" in limits and number > limits["max"]:
            raise _Rejected(f"must be at most {limits['max']}{tail}")
        if "below" in limits and number >= limits["below"]:
            raise _Rejected(f"must be below {limits['below']}{tail}")


def _unknown_key(
    prefix: str, name: str, value: Any, fields: dict[str, Any], root: type
) -> ConfigIssue:
    """Say that a key is unknown, and which one was meant: here, or of that name elsewhere."""
    key = f"{prefix}.{name}" if prefix else name
    shown = ... if isinstance(value, dict) else value
    if key in RENAMED_KEYS:
        return ConfigIssue(key, f"was renamed; write {RENAMED_KEYS[key]} instead", shown)
    paths = _paths(root)
    elsewhere = [path for path in paths if path.rsplit(".", 1)[-1] == name]
    if key in elsewhere:
        owners = [other for other, keys in _variants(root, prefix) if name in keys]
        return ConfigIssue(
            key, f"there is no such key here, only in {prefix}={one_of(owners)}", shown
        )
    last = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    here = {field: f"{prefix}.{field}" if prefix else field for field in fields}
    # What another tool calls a key is known; the rest is guessed, in this group first.
    meant = (
        FOREIGN_NAMES.get(name)
        or here.get(nearest(name, here) or "")
        or last.get(nearest(name, last, cutoff=_ELSEWHERE) or "")
    )
    if meant:
        return ConfigIssue(key, f"there is no such key; did you mean {meant}?", shown)
    where = f"keys of {prefix}" if prefix else "top-level keys"
    return ConfigIssue(key, f"there is no such key; {where}: {', '.join(sorted(fields))}", shown)


def _paths(schema: type, prefix: str = "") -> list[str]:
    found: list[str] = []
    hints = typing.get_type_hints(schema)
    for spec in dataclasses.fields(schema):
        key = f"{prefix}{spec.name}"
        found.append(key)
        nested = _nested(hints[spec.name], {})
        variants = spec.metadata.get("variants")
        options = [*variants.configs().values()] if variants else [nested] if nested else []
        for option in options:
            found += _paths(option, f"{key}.")
    return found


def _variants(root: type, key: str) -> list[tuple[str, set[str]]]:
    """Return ``(name, its keys)`` of each variant of a top-level group."""
    spec = {f.name: f for f in dataclasses.fields(root)}[key]
    variants = spec.metadata.get("variants")
    known = variants.configs() if variants else {}
    return [(name, {f.name for f in dataclasses.fields(v)}) for name, v in known.items()]


def _first_key(schema: type) -> str:
    return dataclasses.fields(schema)[0].name
