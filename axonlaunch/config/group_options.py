"""Options of groups of parameters, ``{pattern: {option: value}}``, typed by the optimizer's fields.

It refuses options that the optimizer does not have; whether a pattern matches the model's names is
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
    problems: list[ConfigIssue],
    *,
    type_one: Callable[..., Any],
) -> dict[str, dict[str, Any]]:
    """Type ``{pattern: {option: value}}``, whose options are a dataclass's fields, or ``extra``'s.

    Each pattern's are typed as the whole dataclass with these values in place of its own would be,
    so that a value is refused here for the reason that it would be there.

    Args:
        patterns: As composed.
        schema: The optimizer's dataclass.
        extra: Of what a group may set beside its fields.
        tree: The optimizer's, as composed.
        key: Dotted, of the patterns.
        problems: Where to add what is wrong.
        type_one: ``validate``'s own way to type a tree by a dataclass.
    """
    if not isinstance(patterns, dict):
        problems.append(ConfigIssue(key, "expected {PATTERN: {OPTION: value}}", patterns))
        return {}
    fields = {f.name for f in dataclasses.fields(schema)} - {"name", key.rpartition(".")[2]}
    extras = {f.name for f in dataclasses.fields(extra)}
    is_free = "arguments" in fields  # whose class takes what it takes
    if is_free:
        fields = {"lr"}
    own = {name: value for name, value in tree.items() if name != key.rpartition(".")[2]}
    typed: dict[str, dict[str, Any]] = {}
    for pattern, options in patterns.items():
        where = f"{key}.{pattern}"
        if not isinstance(options, dict) or not options:
            problems.append(ConfigIssue(where, "expected its options, {OPTION: value}", options))
            continue
        known = fields & options.keys()
        found: list[ConfigIssue] = []
        beside = {name: options[name] for name in extras & options.keys()}
        chosen = {name: options[name] for name in known}
        config = type_one({**own, **chosen}, schema, where, found, root=schema)
        scale = type_one(beside, extra, where, found, root=extra)
        problems += [one for one in found if one.key.removeprefix(f"{where}.") in options]
        typed[str(pattern)] = {}
        for name, value in options.items():
            if name in known or name in beside:
                typed[str(pattern)][name] = getattr(config if name in known else scale, name)
            elif is_free:
                typed[str(pattern)][str(name)] = value
            else:
                message = unknown("option of a group", str(name), sorted(fields | extras))
                problems.append(ConfigIssue(f"{where}.{name}", message, value))
    return typed
