"""Types the options of groups, ``{pattern: {option: value}}``, by the fields of a dataclass.

Groups are parameter groups of an optimizer, or sources of a data mix. Unknown options are reported
here; patterns are compared with the names of the model once there is a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.problems.errors import ConfigIssue


def typed_groups(
    patterns: Any,
    schema: type,
    extra: type,
    tree: dict[str, Any],
    key: str,
    *,
    type_tree: Callable[[dict[str, Any], type, str], Any],
    schema_of: Callable[[dict[str, Any], type], type] = lambda options, schema: schema,
) -> tuple[dict[str, dict[str, Any]], list[ConfigIssue]]:
    """Type ``{pattern: {option: value}}`` by the fields of ``schema`` and ``extra``.

    The options of each pattern are typed as ``schema`` would be with these values, so that the same
    checks apply and the messages are the same.

    Args:
        patterns: Composed value of the key.
        schema: Dataclass of the optimizer or the dataset.
        extra: Dataclass of further options that only groups have.
        tree: Composed tree of the optimizer or the dataset.
        key: Dotted key of the patterns.
        type_tree: The function ``validate``; passed because its module imports this one.
        schema_of: Function from the options of a group and ``schema`` to the group's dataclass.

    Returns:
        The typed options, and the problems.
    """
    if not isinstance(patterns, dict):
        return {}, [ConfigIssue(key, "expected {PATTERN: {OPTION: value}}", patterns)]
    problems: list[ConfigIssue] = []
    extras = {f.name for f in dataclasses.fields(extra)}
    common = {name: value for name, value in tree.items() if name != key.rpartition(".")[2]}
    typed: dict[str, dict[str, Any]] = {}
    for pattern, options in patterns.items():
        group_key = f"{key}.{pattern}"
        if not isinstance(options, dict) or not options:
            message = "expected its options, {OPTION: value}"
            problems.append(ConfigIssue(group_key, message, options))
            continue
        group_schema = schema_of(options, schema)
        fields = _options_of(group_schema, key)
        is_free = "arguments" in fields  # the keywords of the class are not known here
        if is_free:
            fields = {"lr"}
        field_options = {name: options[name] for name in fields & options.keys()}
        extra_options = {name: options[name] for name in extras & options.keys()}
        typed_fields = type_tree({**common, **field_options}, group_schema, group_key)
        typed_extras = type_tree(extra_options, extra, group_key)
        problems += [
            problem
            for problem in (*typed_fields.problems, *typed_extras.problems)
            if problem.key.removeprefix(f"{group_key}.") in options
        ]
        typed[str(pattern)] = {}
        for name, value in options.items():
            if name in field_options or name in extra_options:
                config = typed_fields.config if name in field_options else typed_extras.config
                typed[str(pattern)][name] = getattr(config, name)
            elif is_free:
                typed[str(pattern)][str(name)] = value
            else:
                message = unknown("option of a group", str(name), sorted(fields | extras))
                if name in _shared_options(group_schema):
                    message = f"has one value for all of {key}; set {key.partition('.')[0]}.{name}"
                problems.append(ConfigIssue(f"{group_key}.{name}", message, value))
    return typed, problems


def _options_of(schema: type, key: str) -> set[str]:
    """Return the names of the options that a group may set.

    Args:
        schema: Dataclass of the optimizer or the dataset.
        key: Dotted key of the groups, ``optimizer.groups`` or ``data.mix``.
    """
    return {
        field.name
        for field in dataclasses.fields(schema)
        if field.name not in ("name", key.rpartition(".")[2])
    } - _shared_options(schema)


def _shared_options(schema: type) -> set[str]:
    """Return the names of the options that have the same value in all groups."""
    fields = dataclasses.fields(schema)
    return {field.name for field in fields if field.metadata.get("of_all_groups")}
