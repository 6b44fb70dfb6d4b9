"""Every test that the security page names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "axonlaunch" / "docs" / "security.md"


def test_security_page_names_existing_tests() -> None:
    text = PAGE.read_text()
    files = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    assert not set(re.findall(r"(test_\w+\.py)", text)) - files.keys()
    defined = set(re.findall(r"def (test_\w+)\(", "\n".join(files.values())))
    assert not set(re.findall(r"(test_\w+)(?!\.py)\b", text)) - defined


def test_pickles_are_read_only_in_these_files() -> None:
    """None of them reads pickles from a network, or from files of other users."""
    package = PAGE.parents[1]
    reading = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"pickle\.loads?\(|Unpickler\)|recv_pyobj", path.read_text())
    }
    assert reading == {
        "launch/local/rank_process.py",  # from the parent
        "data/texts/tokenize_ahead.py",  # from the pipe of the process that started it
        "launch/multinode/rendezvous_state.py",  # what this process just pickled
        "system/processes/forked_call.py",  # its own pickle, and from the parent's pipe
        "system/processes/forked_map.py",  # from a child
        "system/processes/isolated.py",  # between a process and its forked copy
    }
