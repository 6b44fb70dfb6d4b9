"""Every test that the security page names is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "axonlaunch" / "docs" / "security.md"


def test_what_backs_the_security_page_exists() -> None:
    text = PAGE.read_text()
    files = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    assert not set(re.findall(r"(test_\w+\.py)", text)) - files.keys()
    defined = set(re.findall(r"def (test_\w+)\(", "\n".join(files.values())))
    assert not set(re.findall(r"(test_\w+)(?!\.py)\b", text)) - defined
