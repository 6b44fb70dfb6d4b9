"""Prepares the text of overrides for Hydra's parser.

Unambiguous mistakes are corrected. Overrides that the parser would need seconds for are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.system.storage.cache import home_folder

_LONGEST, _DEEPEST = 8192, 32
"""Longest and deepest override; Hydra's parser needs seconds for a few times as much."""
MOST_RUNS = 1000
"""Largest number of runs of a sweep; all are checked before the first is launched."""
_QUOTES = "'\""
_KEY = re.compile(r"[~+]*[\w/@-]+(\.[\w/@-]+)*")
_SPLIT = re.compile(r"[\w.+ ]*\w\[[-\d%: ]*\][-\w.+%:\[\] ]*")
_FOREIGN = re.compile(
    r"((?<=[=\[,])\s*|(?<=:) +)([\w./+@ -]*[^\W\d_a-zA-Z][\w./+@ -]*)(?=[,\]}]|$)"
)
"""Matches a value with letters like é, which Hydra's grammar allows only in quotes."""
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def as_meant(text: str) -> str:
    """Return an override in the syntax of Hydra's parser, if its meaning is unambiguous."""
    return _quoted_letters(_quoted_split(_with_home(_without_quoted_keys(text))))


def _quoted_letters(text: str) -> str:
    """Put quotes around values with letters that are not English, such as ``name=größe``."""
    outside = re.split(f"({_QUOTED.pattern})", text)
    outside[::2] = [_FOREIGN.sub(r'\1"\2"', part) for part in outside[::2]]
    return "".join(outside)


def _quoted_split(text: str) -> str:
    """Put quotes around a part of a split, ``data.split=train[:20%]``, as a shell removes them."""
    key, equals, value = text.partition("=")
    return f'{key}{equals}"{value}"' if _SPLIT.fullmatch(value) else text


def _with_home(text: str) -> str:
    """Replace ``~`` by the home folder in ``key=~/data`` and ``key=[~/a,~/b]``, as a shell does."""
    outside = re.split(f"({_QUOTED.pattern})", text)
    home = str(home_folder()).rstrip("/")
    outside[::2] = [re.sub(r"(?<=[=\[,:\s])~(?=/)", lambda _: home, part) for part in outside[::2]]
    return "".join(outside)


def why_unread(text: str, error: str) -> str:
    """Return why the parser rejected an override; an empty text if the reason is unknown.

    Args:
        error: Message of the parser.
    """
    key, equals, value = text.partition("=")
    if not equals:
        return ""
    if not _KEY.fullmatch(key):
        return f"{key!r} is not a key; write it with single dots, as in train.steps=5"
    if "\n" in value or "\r" in value:
        return "its value contains a line break; remove it, or put quotes around the value"
    if not value.startswith(("[", "{")):
        quoted = f"'{key}=\"{value.strip(_QUOTES)}\"'"
        return f"its value has a character that must be quoted; write {quoted}"
    if _open_brackets(text):
        return "a bracket in it is not closed; write key=[1,2], or key={name: 1} in quotes"
    if error.startswith("LexerNoViableAltException"):
        return 'a value in it has a character that must be quoted; write it as in ["a;b"]'
    return f"not an override ({error}); write key=value"


def _without_quoted_keys(text: str) -> str:
    """Remove the quotes of keys, as in ``key={"*.bias": {lr: 0}}``; Hydra's grammar forbids them.

    Quotes around keys with a comma or a colon stay, because these characters would end the key.
    """

    def plain(match: re.Match[str]) -> str:
        prefix, suffix = text[: match.start()].rstrip(), text[match.end() :].lstrip()
        is_key = prefix.endswith(("{", ",")) and suffix.startswith(":")
        inside = match[0][1:-1]
        return inside if is_key and re.fullmatch(r"[\w.*?/@+-]+", inside) else match[0]

    return re.sub(_QUOTED, plain, text)


def too_much(text: str) -> str:
    """Return why an override is too large to be parsed within a second; empty if it is not."""
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


def several_values(text: str, *, is_group: bool) -> str:
    """Return why an override with several values, as in a sweep, describes no single run."""
    key, _, value = text.partition("=")
    listed = "" if is_group or "(" in value else f"write '{key}=[{value}]' for a list; "
    return f"several values; {listed}add -m to run them one after another, or call ax.load for each"


def sweep_issues(parsed: Sequence[Any]) -> list[ConfigIssue]:
    """Return why a sweep is invalid: an override without values, or too many runs."""
    runs, issues = 1, []
    for override in parsed:
        count, text = _num_values(override), override.input_line
        if count:
            runs *= count
        else:
            message = f"{text}: gives no value to run with; write {override.key_or_group}=1,2"
            if override.is_interval_sweep():
                message += ", or add --samples N to draw N runs from it"
            issues.append(ConfigIssue("", message))
    if runs > MOST_RUNS:
        message = f"-m: {runs:,} runs are too many for one sweep; use {MOST_RUNS:,} at most"
        issues.append(ConfigIssue("", message))
    return issues


def number_in_override(override: str, value: float) -> str | None:
    """Return the text of a number in an override; None if several texts mean this number."""
    words = set(re.findall(r"[-+\w.]+", override.partition("=")[2]))
    texts = [word for word in words if _as_number(word) == value]
    return texts[0] if len(texts) == 1 else None


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _num_values(override: Any) -> int:
    """Return the number of values of an override in a sweep; a glob of options counts 1."""
    sweep = override._value
    if override.is_interval_sweep():
        return 0
    if override.is_range_sweep():
        step = sweep.step or 0
        return max(0, math.ceil((sweep.stop - sweep.start) / step)) if step else 0
    return len(sweep.list) if hasattr(sweep, "list") else 1


def without_spaces(overrides: Sequence[str]) -> tuple[list[str], list[ConfigIssue]]:
    """Report overrides that a shell divided at spaces, and return the other overrides.

    ``key = value`` has become three arguments, and ``key={a: 1}`` two.
    """
    rest, problems = [*overrides], []
    while "=" in rest:
        at = rest.index("=")
        around = slice(max(0, at - 1), at + 2)
        written = rest[around]
        problems.append(
            ConfigIssue("", f"{' '.join(written)}: has spaces; write {''.join(written)}")
        )
        del rest[around]
    start = 0
    while start < len(rest):
        end = _end_of_brackets(rest, start)
        if end > start + 1:
            joined = " ".join(rest[start:end])
            message = f"the shell divided it at spaces; put it in quotes: '{joined}'"
            problems.append(ConfigIssue("", f"{joined}: {message}"))
            del rest[start:end]
        else:
            start = end
    return rest, problems


def _end_of_brackets(texts: Sequence[str], start: int) -> int:
    """Return the index after the text that closes the brackets of the text at ``start``.

    Without such a text, or without brackets to close, it is the index after ``start``.
    """
    if _open_brackets(texts[start]) <= 0:
        return start + 1
    ends = range(start + 2, len(texts) + 1)
    return next((end for end in ends if not _open_brackets(" ".join(texts[start:end]))), start + 1)


def _open_brackets(text: str) -> int:
    """Return the number of brackets outside quotes that are opened and not closed."""
    outside = re.sub(_QUOTED, "", text)
    return sum((mark in "[{(") - (mark in ")}]") for mark in outside)
