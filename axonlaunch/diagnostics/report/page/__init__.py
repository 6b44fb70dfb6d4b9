"""Builds the page of runs: one HTML file that loads nothing from elsewhere.

The data of runs is embedded as JSON, which the page's script shows as text only. The content
security policy allows the two embedded scripts by their hashes, and no other resources.
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
_SCRIPTS = ("html_and_formatting.js", "time_charts.js", "coordinates.js", "page.js")


def page_of(data: Mapping[str, Any], *, title: str, is_live: bool = False) -> str:
    """Return the page as HTML.

    Args:
        data: Result of ``page_data``.
        title: Title of the window.
        is_live: Whether the page is served and gets updates from its server.
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
    r"""Return JSON that is safe in a script element, because it can't open or close elements.

    ``</script>`` becomes ``\u003c/script\u003e``, which JSON parsers read as the original text.
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
