"""Converts a plain tree of values to the typed tree, and collects all problems.

Unknown keys, and values that can't be converted without guessing (``convert_value``), are problems.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import MISSING, dataclass, field
from typing import Any, Union, get_args, get_origin

from axonlaunch.config.problems.did_you_mean import nearest, unknown
from axonlaunch.config.problems.errors import ConfigIssue, one_of, plain, value_problems
from axonlaunch.config.problems.other_names import FOREIGN_NAMES, NOT_OFFERED
from axonlaunch.config.registry import EntryPointError, Registry
from axonlaunch.config.validation.convert_value import Rejected, check_range, convert, how_to_quote
from axonlaunch.config.validation.group_options import typed_groups
from axonlaunch.config.values.plain_values import flatten

_EXAMPLES = {"files": "[FILE,...]", "path": "FILE", "target": "package.module:NAME"}
"""Forms of the values of required keys, by the last part of the key."""
_ELSEWHERE = 0.75
"""Least similarity of an unknown name to a key of another group that is suggested for it.

``stepz`` suggests ``train.steps`` (0.8), but ``epochs`` does not suggest ``optimizer.eps`` (0.67).
"""


@dataclass
class Validation:
    """A typed tree, with defaults instead of invalid values, and the problems."""

    config: Any
    problems: list[ConfigIssue] = field(default_factory=list)


def validate(tree: dict[str, Any], schema: type, prefix: str = "") -> Validation:
    """Type a plain tree by a dataclass, and collect all problems.

    Args:
        tree: Nested plain values, as read from YAML.
        prefix: Dotted key of the tree in the configuration; problems have keys below it.
    """
    walk = _Walk(schema)
    return Validation(walk.dataclass(tree, schema, prefix), walk.problems)


class _Walk:
    """Recursive walk over a tree and the dataclasses that type it.

    An example is ``{"optimizer": {"name": "adamw", "lr": "fast"}}``. The field ``optimizer`` has
    variants, so ``_variant`` looks up the dataclass of ``adamw`` and types the group by it. Its
    ``lr`` is a number, so ``convert`` rejects the text. The problem gets the key ``optimizer.lr``,
    ``lr`` gets its default, and the walk continues.
    """

    def __init__(self, root: type) -> None:
        self._root = root
        self.problems: list[ConfigIssue] = []

    def dataclass(self, tree: Any, schema: type, prefix: str) -> Any:
        """Type a group by a dataclass; problems that the dataclass finds come last."""
        if not isinstance(tree, dict):
            example = f"{prefix}.{dataclasses.fields(schema)[0].name}"
            self._add(prefix, f"is a group of keys; set one of them, as in {example}=...", tree)
            tree = {}
        fields = {f.name: f for f in dataclasses.fields(schema)}
        for key, value in tree.items():
            if key not in fields:
                self.problems += _unknown_key(prefix, str(key), value, fields, self._root)
        config = _construct(schema, self._values(tree, schema, prefix), fields)
        reported = {problem.key for problem in self.problems}
        for name, message in value_problems(config):
            if (key := _below(prefix, name)) not in reported:
                self._add(key, message, getattr(config, name, ...))
        return config

    def _values(self, tree: dict[str, Any], schema: type, prefix: str) -> dict[str, Any]:
        """Return the typed values of a group's fields, except invalid and missing ones."""
        hints = typing.get_type_hints(schema)
        fields = {f.name: f for f in dataclasses.fields(schema)}
        values: dict[str, Any] = {}
        for name, spec in fields.items():
            key = _below(prefix, name)
            if (sibling := spec.metadata.get("typed_by")) is not None:
                registry = fields[sibling].metadata["names"]
                values[name] = self._options(tree.get(name), registry, values.get(sibling), key)
            elif name in tree and tree[name] != "???":
                try:
                    values[name] = self._value(tree, spec, hints[name], key, schema)
                except Rejected as reason:
                    expected = spec.metadata.get("allowed")
                    message = f"expected {expected}" if expected else str(reason)
                    message += how_to_quote(message, key, tree[name])
                    self._add(key, message, tree[name])
            elif name in tree or _is_required(spec):
                self._add(key, f"is missing; write {_example(key)}")
        return values

    def _value(self, tree: dict[str, Any], spec: Any, hint: Any, key: str, schema: type) -> Any:
        """Return the typed value of one field.

        Problems inside a group are added to ``problems``.

        Raises:
            Rejected: A plain value is invalid.
        """
        value, facts = tree[spec.name], spec.metadata
        if "each" in facts:
            return self._each(value, facts["each"], key)
        if "groups" in facts:
            typed, problems = typed_groups(
                value,
                schema,
                facts["groups"],
                tree,
                key,
                type_tree=validate,
                **{"schema_of": facts["schema_of"]} if "schema_of" in facts else {},
            )
            self.problems += problems
            return typed
        if "variants" in facts:
            return self._variant(value, facts["variants"], spec, key)
        if (nested := _nested_dataclass(hint, value)) is not None:
            return self.dataclass(value, nested, key)
        if isinstance(value, str) and (reason := facts.get("refused", {}).get(value)):
            raise Rejected(reason)
        converted = convert(value, hint)
        if (names := facts.get("names")) is not None and converted is not None:
            converted = str(converted)  # a registered name, frozen with its value
            _check_name(converted, names, or_null=type(None) in get_args(hint))
        check_range(converted, facts, or_null=type(None) in get_args(hint))
        return converted

    def _variant(self, tree: Any, variants: Registry[Any, Any], spec: Any, key: str) -> Any:
        """Type a group by the dataclass that its ``name`` selects."""
        if not isinstance(tree, dict):
            choices = one_of(variants.names())
            self._add(key, f"is a group; choose one with {key}=NAME: {choices}", tree)
            return _default(spec)
        name = tree.get("name", getattr(_default(spec), "name", None))
        if not isinstance(name, str) or name not in variants:
            kind = variants.kind if spec is None else key
            self._add(f"{key}.name", unknown(kind, plain(name), variants.names()), name)
            return _default(spec)
        try:
            schema = variants.config(name)
        except EntryPointError as error:
            self._add(f"{key}.name", str(error), name)
            return _default(spec)
        self._check_arguments(tree, variants, name, key)
        if "name" in tree:
            tree = {**tree, "name": str(name)}  # a registered name, frozen with its value
        return self.dataclass(tree, schema, key)

    def _options(self, tree: Any, variants: Registry[Any, Any], name: str | None, key: str) -> Any:
        """Type the options of the entry that another field names; None if it has no options."""
        schema = None if name is None else variants.entry(name).config
        if schema is not None:
            named = {"name": name, **(tree or {})} if isinstance(tree, dict | None) else tree
            self._check_arguments(named, variants, name, key)
            return self.dataclass(named, schema, key)
        if tree:
            self._add(key, f"{plain(name)} has no options; remove this setting", tree)
        return None

    def _check_arguments(
        self, tree: Any, variants: Registry[Any, Any], name: str | None, key: str
    ) -> None:
        """Report unknown arguments of an entry that was registered without a dataclass."""
        accepted = None if name is None else variants.entry(name).arguments
        arguments = tree.get("arguments") if isinstance(tree, dict) else None
        if accepted is None or not isinstance(arguments, dict):
            return
        for argument, value in arguments.items():
            if argument not in accepted:
                message = unknown("argument", str(argument), accepted)
                self._add(f"{key}.arguments.{argument}", message, value)

    def _each(self, tree: Any, variants: Registry[Any, Any], key: str) -> list[Any]:
        """Type a list; each item is a name, or a group with a name or a target."""
        if not isinstance(tree, list):
            example = plain(tree) if isinstance(tree, str) else variants.names()[0]
            self._add(key, f"expected a list; write {key}=[{example}]", tree)
            return []
        typed = []
        for number, item in enumerate(tree):
            group = {"name": item} if isinstance(item, str) else item
            if isinstance(group, dict) and "target" in group:
                group = {"name": "custom", **group}
            if message := _explain_unnamed(group, key, variants):
                self._add(f"{key}[{number}]", message, item)
            else:
                typed.append(self._variant(group, variants, None, f"{key}[{number}]"))
        return [config for config in typed if config is not None]

    def _add(self, key: str, message: str, value: Any = ...) -> None:
        self.problems.append(ConfigIssue(key, message, value))


def _explain_unnamed(group: Any, key: str, variants: Registry[Any, Any]) -> str:
    """Return how to write an item of a list that has no name, or has code as its name."""
    custom = f"{{target: package.module:Class}} is a custom {variants.kind}"
    if not isinstance(group, dict):
        return f"is not a name; write {key}=[NAME], {one_of(variants.names())}; {custom}"
    if "name" not in group:
        close = [nearest(str(name), ["name", "target"]) for name in group]
        meant = next((f"did you mean {name}? " for name in close if name), "")
        return f"has no name; {meant}write {key}=[{{name: NAME}}]; {custom}"
    is_code = ":" in str(group["name"]) or (group["name"] == "custom" and "target" not in group)
    return f"names no {variants.kind}; {custom}" if is_code else ""


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _example(key: str) -> str:
    """Return the override that sets a missing key, or that selects an option for its group."""
    group, _, name = key.rpartition(".")
    if name == "name" and group and "." not in group:
        return f"{group}=NAME, one of those that axonlaunch ls {group} lists"
    return f"{key}={_EXAMPLES.get(name, '...')}"


def _is_required(spec: Any) -> bool:
    return spec.default is MISSING and spec.default_factory is MISSING


def _construct(schema: type, values: dict[str, Any], fields: dict[str, Any]) -> Any:
    """Build the dataclass; missing required fields, which were reported already, are None."""
    missing = [name for name, spec in fields.items() if name not in values and _is_required(spec)]
    return schema(**values, **dict.fromkeys(missing))


def _check_name(value: Any, registry: Registry[Any, Any] | None, *, or_null: bool = True) -> None:
    """Check that a registry lists a name and can import it.

    Raises:
        Rejected: The name is not listed, or its package can't be imported.
    """
    if registry is None or value is None:
        return
    if value not in registry:
        if not registry.names():
            raise Rejected(
                f"no {registry.kind} is registered; register yours and name its module in "
                "plugins, or use null"
            )
        close = nearest(value, registry.names())
        meant = f"did you mean {close}? " if close else ""
        null = "; or null" if or_null else ""
        raise Rejected(f"{meant}use {one_of(registry.names())}{null}")
    try:
        registry.entry(value)
    except EntryPointError as error:
        raise Rejected(str(error)) from error


def _default(spec: Any) -> Any:
    """Return the default of a field; None for an item of a list."""
    if spec is None:
        return None
    return spec.default_factory() if spec.default is MISSING else spec.default


def _nested_dataclass(hint: Any, value: Any) -> type | None:
    """Return the dataclass in a type hint; None if the hint allows another type for the value."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    candidates = [option for option in options if dataclasses.is_dataclass(option)]
    if not candidates or (value is None and type(None) in options):
        return None
    if not isinstance(value, dict) and {*options} - {*candidates, type(None)}:
        return None  # another option of the union
    return typing.cast("type", candidates[0])


def _unknown_key(
    prefix: str, name: str, value: Any, fields: dict[str, Any], root: type
) -> list[ConfigIssue]:
    """Return the problems of an unknown key: one for each key below it that other tools have."""
    key = _below(prefix, name)
    if isinstance(value, dict):
        leaves = flatten(value, key).items()
        foreign = [
            ConfigIssue(k, meant, v) for k, v in leaves if (meant := _other_name(k, k, v, root))
        ]
        if foreign:
            return foreign
    return [_unknown_name(prefix, name, value, fields, root)]


def _unknown_name(
    prefix: str, name: str, value: Any, fields: dict[str, Any], root: type
) -> ConfigIssue:
    """Return the problem of an unknown key, with a suggestion from this group or another one."""
    key = _below(prefix, name)
    shown = ... if isinstance(value, dict) else value
    paths = _paths(root)
    elsewhere = [path for path in paths if path.rsplit(".", 1)[-1] == name]
    if key in elsewhere:
        owners = [other for other, keys in _variants(root, prefix) if name in keys]
        return ConfigIssue(
            key, f"there is no such key here, only in {prefix}={one_of(owners)}", shown
        )
    last = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    here = {field: _below(prefix, field) for field in fields}
    # A key of another tool in full, then a slip in this group, then a name of another tool.
    message = _other_name(key, key, value, root)
    if not message and prefix and (meant := nearest(name, here, cutoff=_ELSEWHERE)):
        return ConfigIssue(key, f"there is no such key; did you mean {here[meant]}?", shown)
    if message := message or _other_name(key, name, value, root):
        return ConfigIssue(key, message, shown)
    divided = next((path for path in paths if path.replace(".", "_") == key), "")
    meant = divided or here.get(nearest(name, here) or "")
    if not meant and "arguments" in fields:  # of a registered or custom class or function
        meant = f"{prefix}.arguments.{name}"
    if meant := meant or last.get(nearest(name, last, cutoff=_ELSEWHERE) or ""):
        return ConfigIssue(key, f"there is no such key; did you mean {meant}?", shown)
    listed = f"keys of {prefix}" if prefix else "top-level keys"
    return ConfigIssue(key, f"there is no such key; {listed}: {', '.join(sorted(fields))}", shown)


def _other_name(key: str, name: str, value: Any, root: type) -> str | None:
    """Return the message for a key of another tool; None if no tool has it.

    Args:
        key: Dotted key that the user wrote.
        name: Key that is looked up: the dotted key or its last part.
        value: Value that the user wrote.
        root: Dataclass of the whole configuration.
    """
    if meant := FOREIGN_NAMES.get(name):
        return f"there is no such key; {_question(meant, value, root)}"
    if reason := NOT_OFFERED.get(name):
        return f"there is no such key; {reason}"
    from axonlaunch.config.validation.other_tools.counterparts import (
        counterpart_of,
    )  # tables take a while

    meant = counterpart_of(name, value, in_patterns=name == key and "." not in name)
    return f"there is no such key; {meant}" if meant else None


def _question(meant: str, value: Any, root: type) -> str:
    """Return the question whether the user meant another key.

    It has the user's value if that key accepts it, otherwise the values that the key accepts.

    Args:
        meant: Path of a key, or a text that says what to write.
        value: Value that the user wrote.
        root: Dataclass of the whole configuration.
    """
    if not isinstance(value, dict):
        meant = meant.replace("VALUE", plain(value))
    paths = _paths(root)
    is_group = any(path.startswith(f"{meant}.") for path in paths)
    if meant not in paths or is_group or isinstance(value, dict):
        return f"did you mean {meant}?"
    tree = value
    for name in reversed(meant.split(".")):
        tree = {name: tree}
    problems = [problem for problem in validate(tree, root).problems if problem.key == meant]
    if problems:
        allowed = problems[0].message.removeprefix("there is no such key here, ")
        if allowed.startswith("did you mean "):
            return allowed.replace("did you mean ", f"did you mean {meant}=", 1)
        return f"did you mean {meant}? {allowed}"
    return f"did you mean {meant}={plain(value)}?"


def _paths(schema: type, prefix: str = "") -> list[str]:
    paths: list[str] = []
    hints = typing.get_type_hints(schema)
    for spec in dataclasses.fields(schema):
        key = f"{prefix}{spec.name}"
        paths.append(key)
        nested = _nested_dataclass(hints[spec.name], {})
        variants = spec.metadata.get("variants")
        options = [*variants.configs().values()] if variants else [nested] if nested else []
        for option in options:
            paths += _paths(option, f"{key}.")
    return paths


def _variants(root: type, key: str) -> list[tuple[str, set[str]]]:
    """Return ``(name, keys)`` of each variant of a top-level group."""
    spec = {f.name: f for f in dataclasses.fields(root)}[key]
    variants = spec.metadata.get("variants")
    configs = variants.configs() if variants else {}
    return [(name, {f.name for f in dataclasses.fields(v)}) for name, v in configs.items()]
