"""Options of groups, ``{pattern: {option: value}}``, typed by the fields of a dataclass.

Groups are of parameters, of an optimizer, or sources, of a mix. It refuses options that there are
not; whether a pattern matches the model's names is
found where there is a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from axonlaunch.config.did_you_mean import unknown
from axonlaunch.config.errors import ConfigIssue


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
    """Type ``{pattern: {option: value}}``, whose options are a dataclass's fields, or ``extra``'s.

    Each pattern's are typed as the whole dataclass with these values in place of its own would be,
    so that a value is refused here for the reason that it would be there.

    Args:
        patterns: As composed.
        schema: The dataclass of the optimizer, or of the data.
        extra: Of what a group may set beside its fields.
        tree: Of the optimizer or the data, as composed.
        key: Dotted, of the patterns.
        type_tree: ``validate``, which imports this module.
        schema_of: A group's options and ``schema`` to the dataclass of that group.

    Returns:
        The typed options, and what is wrong with them.
    """
    if not isinstance(patterns, dict):
        return {}, [ConfigIssue(key, "expected {PATTERN: {OPTION: value}}", patterns)]
    problems: list[ConfigIssue] = []
    extras = {f.name for f in dataclasses.fields(extra)}
    own = {name: value for name, value in tree.items() if name != key.rpartition(".")[2]}
    typed: dict[str, dict[str, Any]] = {}
    for pattern, options in patterns.items():
        where = f"{key}.{pattern}"
        if not isinstance(options, dict) or not options:
            problems.append(ConfigIssue(where, "expected its options, {OPTION: value}", options))
            continue
        of_group = schema_of(options, schema)
        fields = _options_of(of_group, key)
        is_free = "arguments" in fields  # whose class takes what it takes
        if is_free:
            fields = {"lr"}
        known = fields & options.keys()
        beside = {name: options[name] for name in extras & options.keys()}
        chosen = {name: options[name] for name in known}
        of_fields = type_tree({**own, **chosen}, of_group, where)
        of_extras = type_tree(beside, extra, where)
        problems += [
            problem
            for problem in (*of_fields.problems, *of_extras.problems)
            if problem.key.removeprefix(f"{where}.") in options
        ]
        typed[str(pattern)] = {}
        for name, value in options.items():
            if name in known or name in beside:
                config = of_fields.config if name in known else of_extras.config
                typed[str(pattern)][name] = getattr(config, name)
            elif is_free:
                typed[str(pattern)][str(name)] = value
            else:
                message = unknown("option of a group", str(name), sorted(fields | extras))
                problems.append(ConfigIssue(f"{where}.{name}", message, value))
    return typed, problems


def _options_of(schema: type, key: str) -> set[str]:
    """Return the fields of a dataclass that a group may set."""
    return {
        field.name
        for field in dataclasses.fields(schema)
        if field.name not in ("name", key.rpartition(".")[2])
        and not field.metadata.get("of_all_groups")
    }
