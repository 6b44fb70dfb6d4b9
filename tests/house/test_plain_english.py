"""Tests that docstrings, comments, messages, pages and names of tests avoid phrases like riddles.

The patterns are a thermometer: a clear sentence is the aim, see CONTRIBUTING.md. PyTorch's and
Lightning Fabric's docstrings have fewer than one match per 1,000 words.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_PER_THOUSAND = 2.0
VERBS = (
    "is|was|are|were|it|they|a|an|the|each|one|torch|no|none|nobody|another|others|ranks|its|that|"
    "does|has|had|can|could|comes|came|goes|makes|gives|takes|lies|stands|belongs|surrounds|divides|"
    "updates|follows|computes|decides"
)
PATTERNS = (
    r"\b(for|by|of|to|from|who) who(ever)?\b|\bwhoever\b",
    r"\bWho(ever)? (is|has|had|takes|reads)\b",
    rf"\bwhat ({VERBS})\b",
    r"\bof (which|whom|whose)\b",
    r"\b(is|are|was|were) none\b|\bnone is\b",
    r"\b(no|some|any)body\b",
    r"\balone\b",
    r"\bbut for\b|\ball but\b",
    r", for (it|they|a|an|the|what|one|each|no|none|who|ranks|torch|some|others|its|their)\b",
    r"\b(lies|stands|stand|lie)\b",
    r"\bbesides?\b",
    r"\b(so|as) many\b",
    r"\b(is|are) asked\b|\btold\b|\b(is|are|was) given\b",
    r"\bin (its|the|their) place\b|\bin place of\b",
    r"\b(gives?|gave|made|makes?) of\b",
    r"\bas (torch|PEFT|they|it|that|those|others|numpy|transformers) (has|have|is|are|says)\b",
)
# Texts of arguments and errors that are clear only together with the name or the summary.
FRAGMENT = (
    r"^\s*\**\w+: (Of|As|In|Its|Their|They|These|Those|It|Where|Whose|Whom|Who|What|How|From|By|"
    r"With|The same|There is such)\b"
    r"|^\s*\**\w+: (A|An|The|This) \w+\.$"
)


@functools.cache
def sentences(path: Path) -> list[str]:
    """Return docstrings and comments of a Python file, or the prose of a page."""
    text = path.read_text()
    if path.suffix == ".md":
        return [re.sub(r"```.*?```", "", text, flags=re.DOTALL)]
    expressions = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        *(str(value.value) for value in expressions if isinstance(value, ast.Constant)),
        *(token.string for token in tokens if token.type == tokenize.COMMENT),
    ]


def messages(path: Path) -> Iterator[str]:
    """Yield the texts of a Python file that may be printed: strings of four words or more."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for constant in constants:
        text = constant.value
        if isinstance(text, str) and len(text.split()) > 3 and id(constant) not in docstrings:
            yield text


def matches(texts: Iterator[str], patterns: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return the number of words, and each match with the words around it."""
    words, found = 0, []
    for text in texts:
        words += len(text.split())
        for pattern in patterns:
            for match in re.finditer(pattern, text, re.MULTILINE):
                around = text[max(0, match.start() - 40) : match.end() + 40]
                found.append(" ".join(around.split()))
    return words, found


def check(texts: Iterator[str], patterns: tuple[str, ...], *, least: int = 1000) -> None:
    """Check the number of matches in texts with more than ``least`` words."""
    words, found = matches(texts, patterns)
    assert words > least
    assert 1000 * len(found) / words <= MOST_PER_THOUSAND, found


def names_of_tests(path: Path) -> Iterator[str]:
    """Yield the names of the tests of a module as sentences."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


PACKAGE = sorted(ROOT.glob("axonlaunch/**/*.py"))
TESTS = sorted(ROOT.glob("tests/**/test_*.py"))
PAGES = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("axonlaunch/docs/*.md")),
]


def test_docstrings_and_comments_are_in_plain_english() -> None:
    check((text for path in PACKAGE for text in sentences(path)), PATTERNS)


def test_descriptions_of_arguments_and_errors_are_no_fragments() -> None:
    assert matches((text for path in PACKAGE for text in sentences(path)), (FRAGMENT,))[1] == []


def test_names_of_tests_are_in_plain_english() -> None:
    check((name for path in TESTS for name in names_of_tests(path)), PATTERNS)


def test_messages_are_in_plain_english() -> None:
    check((text for path in PACKAGE for text in messages(path)), PATTERNS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_each_page_is_in_plain_english(page: Path) -> None:
    check(iter(sentences(page)), PATTERNS, least=200)


@pytest.mark.parametrize(
    "text",
    [
        "What a rank holds beside its own part, for it is none of ours.",
        "engine: Its.\nfrozen: As well.",
        "    module: The module.",
        "a file that is made of what lies elsewhere",
    ],
)
def test_riddles_are_found(text: str) -> None:
    assert matches(iter([text]), (*PATTERNS, FRAGMENT))[1]
