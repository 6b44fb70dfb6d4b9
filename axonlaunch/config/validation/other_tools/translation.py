"""The experiment that is written from another tool's configuration, and what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.did_you_mean import nearest
from axonlaunch.config.problems.errors import in_one_line, plain

RemarkKind = Literal["left out", "unknown", "note"]
"""left out: training differs; unknown: no known key of the tool; note: expressed in another way."""


@dataclass(frozen=True)
class Remark:
    """A key that was not translated one to one.

    Attributes:
        kind: Whether training differs.
        key: Dotted key of the other tool.
        value: Value of the key.
        text: Reason, and what to do.
    """

    kind: RemarkKind
    key: str
    value: Any
    text: str

    @property
    def setting(self) -> str:
        """Key and value, shortened, in one line."""
        shown = plain(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return in_one_line(f"{self.key}={shown}")


@dataclass(frozen=True)
class Setting:
    """A value of the experiment.

    Attributes:
        value: Plain value, or the name of an option.
        origin: Description of the keys that it came from, for a comment.
        keys: Keys of the file that the value came from.
    """

    value: Any
    origin: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Translation of one key.

    Attributes:
        kind: Outcome for most values of the key.
        apply: Function that gets the translation, the key and its value.
        reason: Reason why a key is not needed; empty for other keys.
    """

    kind: Literal["expressed", "not needed", "left out"]
    apply: Callable[[Translation, str, Any], None]
    reason: str = ""


Table = Mapping[str, Rule]
"""Rules by dotted key; ``name.*`` is for all keys below ``name``."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A tool whose configurations can be translated.

    Attributes:
        name: Name of the tool, as in ``--from``.
        marks: Sets of keys; a file with all keys of one set is a configuration of this tool.
        keys: Rules of all known keys.
        defaults: Values that the tool uses where the file has none, and that differ from ours.
        finish: Function that translates keys that depend on each other.
        companions: Keys with which keys take effect that otherwise have none, as those of an
            adapter.
    """

    name: str
    marks: tuple[frozenset[str], ...]
    keys: Table
    defaults: Mapping[str, Any]
    finish: Callable[[Translation], None]
    companions: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Translation:
    """Settings and remarks that the rules of a format collect.

    Attributes:
        tool: Format of the file.
        source: Nested values of the file, without keys that are null.
        devices: Number of devices that the original runs on.
        folder: Folder of the file, for files that it names.
    """

    tool: Format
    source: Mapping[str, Any]
    devices: int
    folder: Path
    options: dict[str, Setting] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    not_needed: list[str] = field(default_factory=list)
    expressed: list[str] = field(default_factory=list)

    @property
    def changes_training(self) -> bool:
        """Whether something that changes training was left out."""
        return any(remark.kind != "note" for remark in self.remarks)

    def has(self, key: str) -> bool:
        """Return whether the file sets a key."""
        return self._in_file(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key in the file, else the tool's default."""
        value = self._in_file(key)
        return self.tool.defaults.get(key, default) if value is None else value

    def number(self, key: str, default: float = 0) -> float:
        """Return a number of the file; other values are left out."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        self.leave_out(key, "is not a number; set the value yourself")
        return default

    def items(self, key: str) -> list[Any]:
        """Return a list of the file; a single value is a list with one item."""
        value = self.get(key, [])
        return list(value) if isinstance(value, list) else [value]

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return a mapping of the file; other values are left out."""
        value = self.get(key, {})
        if isinstance(value, Mapping):
            return value
        self.leave_out(key, "has no keys with values; set the values yourself")
        return {}

    def flag(self, key: str) -> bool:
        """Return whether a key of the file is on."""
        return self.get(key) not in (None, False, "false", "no", "none", 0, "")

    def option(self, group: str, name: str, *keys: str) -> None:
        """Select an option of a group, such as ``model=hf``."""
        self.options[group] = Setting(name, self._origin(keys), self._keys_in_file(keys))

    def use_hub_model(self, key: str) -> None:
        """Select the group of models of transformers.

        Args:
            key: Key of the other tool that names the model.
        """
        self.option("model", TransformersModel.name, key)

    def set(self, key: str, value: Any, *keys: str, note: str = "") -> None:
        """Set a key of the experiment.

        Args:
            key: Dotted key.
            value: Plain value.
            keys: Keys of the other tool that the value came from.
            note: Addition to the comment.
        """
        origin = self._origin(keys)
        origin = f"{origin}; {note}" if note else origin
        self.settings[key] = Setting(value, origin, self._keys_in_file(keys))

    def leave_out(self, key: str, text: str) -> None:
        """Report a key that changes training and was left out."""
        self._remark("left out", key, text)

    def note(self, key: str, text: str) -> None:
        """Report a key that is expressed in another way."""
        self._remark("note", key, text)

    def report_unknown(self, key: str) -> None:
        """Report a key that the table does not have."""
        tool_keys = [name for name in self.tool.keys if not name.endswith("*")]
        close = nearest(key, tool_keys, cutoff=0.75)
        text = f"is no known key of {self.tool.name}"
        text += f"; did you mean {close}?" if close else "; remove it, or set what it means"
        self._remark("unknown", key, text)

    def _remark(self, kind: RemarkKind, key: str, text: str) -> None:
        remark = Remark(kind, key, self.get(key), text)
        if remark not in self.remarks:
            self.remarks.append(remark)

    def _origin(self, keys: tuple[str, ...]) -> str:
        written = [*self._keys_in_file(keys)]
        assumed = [key for key in keys if key in self.tool.defaults and key not in written]
        if assumed or not written:
            names = f" ({', '.join(assumed)})" if assumed else ""
            written.append(f"default of {self.tool.name}{names}")
        return ", ".join(written)

    def _keys_in_file(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key for key in keys if self.has(key))

    def _in_file(self, key: str) -> Any:
        value: Any = self.source
        for part in key.split("."):
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping):
                value = value.get(part)
            else:
                return None
        return value
