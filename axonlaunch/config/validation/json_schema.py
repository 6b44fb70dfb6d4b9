"""Describes configuration files as a JSON schema (draft 2020-12), for editors and validators.

The schema is of a file that ``train FILE.yaml`` takes and of a frozen ``config.yaml``. It knows the
keys, types and limits of all included options; rules between values are only checked by a load.
Names that are neither included nor installed are accepted only in files with ``plugins``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from axonlaunch.config.registry import Registry
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.validation.key_reference import meanings
from axonlaunch.config.values.plain_values import to_tree

FILE_NAME = "axonlaunch-schema.json"
Schema = dict[str, Any]
_TYPES: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},
}
_LIMITS = {
    "min": "minimum",
    "max": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
}
_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{|^[-+]?[\d.]+[eE][-+]?\d+$"}
"""A reference to another key or to a variable of the environment, which any value may be, or a
number like 1e-3, which YAML 1.1 reads as text."""
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}
_REGISTERED = {spec.name for spec in dataclasses.fields(RunConfig) if "variants" in spec.metadata}
"""Groups with options that plug-ins can register."""
_ANY_GROUP: Schema = {"type": ["object", "null"]}


def editor_line(path: str) -> str:
    """Return the comment by which editors find the schema of a YAML file.

    Args:
        path: Path of the schema, relative to the file.
    """
    return f"# yaml-language-server: $schema={path}"


def json_schema(options: Mapping[str, list[str]]) -> Schema:
    """Return the schema of configuration files.

    Args:
        options: Options of each group that has files, as ``{"strategy": ["ddp", "fsdp"]}``.
    """
    root = _group(RunConfig, defaults=RunConfig())
    choices: dict[str, Schema] = {}
    for group, names in options.items():
        included = {"anyOf": [{"enum": [*names, None]}, _REFERENCE]}
        open_choice = {"type": ["string", "null"], "anyOf": [{"enum": [*names, None]}, {}]}
        choices[group] = open_choice if group in _REGISTERED else included
        keys = root["properties"].get(group, {"description": "a complete recipe"})
        described = {name: keys.pop(name) for name in ("description",) if name in keys}
        variants = [keys] if keys else []
        root["properties"][group] = {**described, "anyOf": [choices[group], *variants]}
    root["properties"]["defaults"] = {
        "description": "options of groups, [{override /model: hf}], and names of other files",
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, _defaults_entry(choices)]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of axonlaunch",
        **root,
        "if": {
            "required": ["plugins"],
            "properties": {"plugins": {"not": {"enum": [[], "", None]}}},
        },
        "else": _without_plugins(options),
    }


def _defaults_entry(choices: Mapping[str, Schema]) -> Schema:
    """Return the schema of ``{override /model: hf}``, from the schema of each group's option."""
    patterns = {
        rf"^((optional|override) )?/?{group}(@.+)?$": choice for group, choice in choices.items()
    }
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False}


def _without_plugins(options: Mapping[str, list[str]]) -> Schema:
    """Return the schema that, in files without plug-ins, rejects names that they could register."""
    overlay = _registered_names(RunConfig)
    choices: dict[str, Schema] = {}
    for group, names in options.items():
        if group in _REGISTERED:
            registered = {"enum": [*names, None]}
            keys = {"type": "object", "properties": {"name": {"anyOf": [registered, _REFERENCE]}}}
            overlay["properties"][group] = {"anyOf": [registered, _REFERENCE, keys]}
            choices[group] = {"anyOf": [registered, _REFERENCE]}
    # Entries with other groups are left to the schema of all files.
    entry = {**_defaults_entry(choices), "additionalProperties": True, "type": ["object", "string"]}
    overlay["properties"]["defaults"] = {"type": "array", "items": entry}
    return overlay


def _registered_names(schema: type) -> Schema:
    """Return a schema that allows only the registered names in a dataclass's keys."""
    hints, properties = typing.get_type_hints(schema), dict[str, Schema]()
    for spec in dataclasses.fields(schema):
        facts, hint = spec.metadata, hints[spec.name]
        registry = facts.get("each") or facts.get("variants") or facts.get("names")
        if registry is not None:
            registered = {"enum": [*registry.names(), None]}
            entry = {"properties": {"name": {"anyOf": [registered, _REFERENCE]}}, "type": "object"}
            name = {"anyOf": [registered, _REFERENCE, entry]}
            properties[spec.name] = {"items": name} if "each" in facts else name
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            properties[spec.name] = _registered_names(hint)
    return {"properties": properties}


def _group(schema: type, *, defaults: Any = None, name: str | None = None) -> Schema:
    """Return the schema of a dataclass; every key may be absent.

    Args:
        schema: Dataclass of the group.
        defaults: Instance with the default of each key; None for none.
        name: Required value of the key ``name`` if it is there; None allows any.
    """
    hints, texts = typing.get_type_hints(schema), meanings(schema)
    properties: dict[str, Schema] = {}
    for spec in dataclasses.fields(schema):
        if spec.name == "name" and name is not None:
            properties["name"] = {"const": name}
            continue
        described: Schema = {"description": texts[spec.name]} if texts.get(spec.name) else {}
        if defaults is not None and not dataclasses.is_dataclass(
            value := getattr(defaults, spec.name)
        ):
            described["default"] = to_tree(value)
        properties[spec.name] = {**described, **_key(spec, hints[spec.name])}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key(spec: Any, hint: Any) -> Schema:
    """Return the schema of one field."""
    facts = spec.metadata
    if "each" in facts:
        items = [{"type": "string"}, *_variants(facts["each"])]
        return {"anyOf": [{"type": "array", "items": {"anyOf": items}}, _INTERPOLATION]}
    if "variants" in facts:
        return {"anyOf": _variants(facts["variants"])}
    if "typed_by" in facts or "groups" in facts:
        return _ANY_GROUP
    if "names" in facts:  # a plug-in may register others
        included = {"enum": [*facts["names"].names(), None]}
        return {"anyOf": [included, {"type": "string"}]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _group(hint, defaults=_default(spec))
    return {"anyOf": _with_interpolation(_types(hint, facts))}


def _default(spec: Any) -> Any:
    """Return the default of a field; None if it has none."""
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return None if spec.default is dataclasses.MISSING else spec.default


def _with_interpolation(types: list[Schema]) -> list[Schema]:
    return types if _TYPES[str] in types else [*types, _INTERPOLATION]


def _variants(registry: Registry[Any, Any]) -> list[Schema]:
    """Return a schema for each registered name, and one for names that plug-ins register."""
    configs = registry.configs()
    other: Schema = {
        "type": "object",
        "properties": {"name": {"not": {"enum": [*configs]}}},
        "required": ["name"],
    }
    targets: Schema = {"type": "object", "required": ["target"]}
    included = [
        _group(schema, name=name)
        for name, schema in configs.items()
        if dataclasses.is_dataclass(schema)
    ]
    return [*included, other, targets]


def _types(hint: Any, facts: Mapping[str, Any]) -> list[Schema]:
    """Return a schema for each alternative of a type hint."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [each for option in inside for each in _types(option, facts)]
    if origin is Literal:
        return [{"enum": [*inside]}]
    if origin in (list, tuple):
        items: Schema = {"anyOf": _with_interpolation(_types(inside[0], {}))}
        several: Schema = {"type": "array", "items": items}
        return [several, {"type": "string"}] if inside[0] is str else [several]
    if origin is dict:
        return [{"type": "object", "additionalProperties": {"anyOf": _types(inside[1], {})}}]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [_group(hint)]
    described = dict(_TYPES[hint])
    if hint in (int, float):
        described |= {_LIMITS[limit]: facts[limit] for limit in _LIMITS if limit in facts}
    return [described]
