"""Overrides as they were typed, before Hydra's parser has them.

It puts right what can only be meant in one way, and refuses what the parser would take seconds for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonlaunch.config.errors import ConfigIssue

_LONGEST, _DEEPEST = 8192, 32
"""Characters and levels of an override: Hydra's parser takes seconds for a multiple of it."""
MOST_RUNS = 1000
"""Runs of a sweep: all are checked before the first is launched."""
_QUOTES = "'\""
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def as_meant(text: str) -> str:
    """Return an override as Hydra's parser takes it, where that can be meant in one way alone."""
    return _with_home(_without_quoted_keys(text))


def _with_home(text: str) -> str:
    """Write the home folder for ``~`` in ``key=~/data`` and ``key=[~/a,~/b]``, as a shell would."""
    outside = re.split(f"({_QUOTED.pattern})", text)
    home = str(Path.home())
    outside[::2] = [re.sub(r"(?<=[=\[,:\s])~(?=/)", lambda _: home, part) for part in outside[::2]]
    return "".join(outside)


def why_unread(text: str, error: str) -> str:
    """Return why the parser can't read an override, where that is known; else an empty text.

    Args:
        text: The override.
        error: What the parser says.
    """
    key, equals, value = text.partition("=")
    if not equals:
        return ""
    if "\n" in value or "\r" in value:
        return "its value contains a line break; remove it, or put quotes around the value"
    if not value.startswith(("[", "{")):
        quoted = f"'{key}=\"{value.strip(_QUOTES)}\"'"
        return f"its value has a character that must be quoted; write {quoted}"
    if error.startswith("LexerNoViableAltException"):
        return 'a value in it has a character that must be quoted; write it as in ["a;b"]'
    return f"not an override ({error}); write key=value"


def _without_quoted_keys(text: str) -> str:
    """Take the quotes from the keys of ``key={"*.bias": {lr: 0}}``, where Hydra's grammar has none.

    Only from those that need none: it would take a comma or a colon for what ends the key.
    """

    def plain(match: re.Match[str]) -> str:
        before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
        is_key = before.endswith(("{", ",")) and after.startswith(":")
        inside = match[0][1:-1]
        return inside if is_key and re.fullmatch(r"[\w.*?/@+-]+", inside) else match[0]

    return re.sub(_QUOTED, plain, text)


def too_much(text: str) -> str:
    """Say what is too much of an override to be parsed in a second; empty if nothing is."""
    if len(text) > _LONGEST:
        return (
            f"is longer than {_LONGEST} characters; write it to a YAML file, and give its folder "
            "by --config-dir"
        )
    depth = 0
    for mark in re.sub(_QUOTED, "", text):
        depth += (mark in "[{(") - (mark in ")}]")
        if depth > _DEEPEST:
            return f"is nested deeper than {_DEEPEST} levels; write it to a YAML file"
    return ""


def sweep_issues(parsed: Sequence[Any]) -> list[ConfigIssue]:
    """Return why parsed overrides are no sweep: one has no values, or there are too many runs."""
    runs, issues = 1, []
    for override in parsed:
        count, text = _num_values(override), override.input_line
        if count:
            runs *= count
        else:
            message = f"{text}: gives no value to run with; write {override.key_or_group}=1,2"
            issues.append(ConfigIssue("", message))
    if runs > MOST_RUNS:
        message = f"-m: {runs:,} runs are more than one sweep takes; use {MOST_RUNS:,} at most"
        issues.append(ConfigIssue("", message))
    return issues


def _num_values(override: Any) -> int:
    """Return how many values an override gives a sweep; of a glob, which lists options, 1."""
    sweep = override._value
    if override.is_interval_sweep():
        return 0
    if override.is_range_sweep():
        step = sweep.step or 0
        return max(0, math.ceil((sweep.stop - sweep.start) / step)) if step else 0
    return len(sweep.list) if hasattr(sweep, "list") else 1


def without_spaces(overrides: Sequence[str]) -> tuple[list[str], list[ConfigIssue]]:
    """Separate ``key = value``, which a shell passes as three arguments, and report it."""
    rest, problems = [*overrides], []
    while "=" in rest:
        at = rest.index("=")
        of_it = slice(max(0, at - 1), at + 2)
        written = rest[of_it]
        problems.append(
            ConfigIssue("", f"{' '.join(written)}: has spaces; write {''.join(written)}")
        )
        del rest[of_it]
    return rest, problems
