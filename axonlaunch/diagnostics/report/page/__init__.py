"""The page of runs: one file of HTML that fetches nothing, whatever the runs hold.

What runs say stands in it as JSON, which its script shows as text. The page's policy lets a browser
run the two scripts that stand in it, by their hashes, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

_UPLOT = "uplot"
_SCRIPTS = ("html_and_formatting.js", "page.js")


def page_of(data: Mapping[str, Any], *, title: str, is_live: bool = False) -> str:
    """Return the page.

    Args:
        data: As ``page_data`` returns it.
        title: Of the window.
        is_live: It is served, and asks its server for what is new.
    """
    here = files(__name__)
    uplot = (here / _UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8")
    script = "".join((here / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src {_hash(uplot)} {_hash(script)}"
    )
    if is_live:
        policy += "; connect-src 'self'"
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        title=html.escape(title),
        uplot_css=(here / _UPLOT / "uPlot.min.css").read_text(encoding="utf-8"),
        css=(here / "page.css").read_text(encoding="utf-8"),
        uplot_js=uplot,
        js=script,
        data=as_script_data({**data, "live": is_live}),
    )


def as_script_data(data: Mapping[str, Any]) -> str:
    r"""Return JSON that can stand in a script element: no text in it ends or opens one.

    ``</script>`` becomes ``\u003c/script>``, which JSON reads as what it was.
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
