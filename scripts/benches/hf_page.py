"""The table of ``scripts/bench hf`` as data of the package and as a page of its documentation."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_tiny

from axonlaunch.verification import proved

PAGE = Path(proved.__file__).parents[1] / "docs" / "huggingface.md"
HEADINGS = {
    "fsdp 2": "fully sharded (FSDP)",
    "zero1 2": "optimizer states sharded (ZeRO-1)",
    "tensor 2": "tensor parallel",
    "tensor 4": "tensor parallel on more ranks than there are key-value heads",
    "pipeline 2": "pipeline, 1F1B",
    "zero bubble 2": "pipeline, zero bubble in V shape",
    "context 2": "context parallel",
    "hybrid 2x2x2": "sharded x tensor x pipeline",
    "export": "trained for a step, exported, loaded by `from_pretrained` and by `model.path`",
}
_INTRODUCTION = """\
# Hugging Face models

Which causal language models of transformers train, under which layout, as one process does: a table
that `scripts/bench hf` wrote by running each of them.

{which} of transformers {transformers} that `AutoModelForCausalLM` knows: built at a tiny
configuration (random weights, fp32, 4 blocks, torch {torch}) and trained for 2 steps in each layout
and in one process. **yes**: losses, all gradients and all parameters agree to rounding (1e-5), as
`axonlaunch verify` compares them. **no**: the layout is refused before anything starts, or was seen
to differ; the reason is below the table. A tiny configuration proves code, not sizes: degrees that
your model's heads or layers do not allow are refused with the legal ones, and `axonlaunch verify`
proves your own model and layout.

```bash
axonlaunch ls hf --like llama
axonlaunch ls hf --like gemma --json
axonlaunch verify model=hf 'model.config={{model_type: qwen3, vocab_size: 256, hidden_size: 64, \
num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, \
intermediate_size: 128}}' \
model.init=random strategy=tensor strategy.tensor.degree=2 launch.nproc=2
```

How to train them: [models](models.md).
"""


@dataclass(frozen=True)
class Row:
    """What was seen of a class under a layout.

    Attributes:
        model_type: Its configuration's.
        layout: As ``LAYOUTS`` names it.
        outcome: equal, different, refused (before anything starts), failed or late.
        reason: Why not equal, or with what settings, in words.
        versions: Of what it was seen with.
    """

    model_type: str
    layout: str
    outcome: str
    reason: str = ""
    versions: str = ""


def write(
    rows: Iterable[Row],
    *,
    versions: Mapping[str, str],
    classes: int,
    layouts: Mapping[str, list[str]],
) -> None:
    """Write the package's data, a line for each class, and the page from it."""
    head = {"versions": dict(versions), "classes": classes, "layouts": dict(layouts)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    families = [f"  {json.dumps(kind)}: {json.dumps(family)}" for kind, family in _families(rows)]
    lines += [' "families": {', ",\n".join(families), " }"]
    proved.FILE.write_text("\n".join(["{", *lines, "}", ""]))
    proved.proved_table.cache_clear()
    PAGE.write_text(page(proved.proved_table()))


def label(versions: Mapping[str, str]) -> str:
    """Return the ``versions`` of a row."""
    return " ".join(f"{name} {version}" for name, version in versions.items())


def shipped() -> Iterator[Row]:
    """Yield the rows of the table that stands."""
    table = proved.proved_table()
    versions = label(table.versions)
    for kind, family in table.families.items():
        for layout in table.layouts:
            if refusal := family.refused.get(layout):
                outcome, _, reason = refusal.partition(": ")
            else:
                outcome, reason = "equal", family.notes.get(layout, "")
            yield Row(kind, layout, outcome, reason, versions)


def _families(rows: Iterable[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    from axonlaunch.models.hf import library

    types, by_type = library.causal_types(), defaultdict(list)
    for row in rows:
        by_type[row.model_type].append(row)
    for kind, of_kind in sorted(by_type.items()):
        equal = {row.layout: row.reason for row in of_kind if row.outcome == "equal"}
        yield (
            kind,
            {
                "class": str(types[kind]),
                # What holds a model of text beside another is refused as a whole.
                "also": [
                    other
                    for other in types
                    if types[other] == types[kind]
                    and other != kind
                    and not hf_tiny.is_composite(other)
                ],
                "refused": {
                    row.layout: _without_places(f"{row.outcome}: {row.reason}")
                    for row in of_kind
                    if row.outcome != "equal"
                },
                "notes": {layout: note for layout, note in equal.items() if note},
            },
        )


def _without_places(reason: str) -> str:
    """Leave out which temporary folder it was, and how much memory the machine had."""
    reason = re.sub(r"/tmp/\w+/", "", reason)
    return reason.partition("; a rank's share of this node's memory")[0]


def page(table: proved.Proved) -> str:
    """Return the page."""
    done = len(table.families)
    all_of_them = (
        "Every class" if done == table.classes else f"{done} of the {table.classes} classes"
    )
    head = _INTRODUCTION.format(which=all_of_them, **table.versions)
    return "\n".join([head, *_counts(table), "", *_table(table), *_notes(table), *_why(table)])


def _counts(table: proved.Proved) -> list[str]:
    lines = ["| layout | | settings | proved |", "| --- | --- | --- | --- |"]
    total = len(table.families)
    for layout, overrides in table.layouts.items():
        settings = " ".join(word for word in overrides if not word.startswith("launch."))
        lines.append(
            f"| {layout} | {HEADINGS[layout]} | `{settings}` | {table.count(layout)} of {total} |"
        )
    return lines


def _table(table: proved.Proved) -> list[str]:
    lines = ["## The table", "", f"| `model_type` | {' | '.join(table.layouts)} |"]
    lines.append("| --- |" + " --- |" * len(table.layouts))
    for kind, family in table.families.items():
        answers = (_answer(family, layout) for layout in table.layouts)
        lines.append(f"| `{kind}` | {' | '.join(answers)} |")
    also = {other: kind for kind, entry in table.families.items() for other in entry.also}
    if also:
        same = ", ".join(f"`{other}` (`{kind}`)" for other, kind in sorted(also.items()))
        lines += ["", f"Of the same class as another: {same}."]
    return lines


def _answer(family: proved.Family, layout: str) -> str:
    if layout in family.refused:
        return "no"
    return "yes*" if layout in family.notes else "yes"


def _notes(table: proved.Proved) -> list[str]:
    """Return what a proof needed besides."""
    lines = []
    for layout in table.layouts:
        for kind, family in table.families.items():
            if note := family.notes.get(layout):
                lines.append(f"- `{kind}`, {layout}: {_shown(note)}")
    return ["", "Of those with a star:", "", *lines] if lines else []


def _why(table: proved.Proved) -> list[str]:
    """Return the reasons, by layout; families that share one are together."""
    lines = ["", "## Why not", ""]
    for layout in table.layouts:
        kinds: dict[str, list[str]] = defaultdict(list)
        for kind, family in table.families.items():
            if reason := family.refused.get(layout):
                kinds[_shown(reason)].append(f"`{kind}`")
        if kinds:
            lines += [f"### {layout}", ""]
            lines += [f"- {', '.join(names)}: {reason}" for reason, names in kinds.items()]
            lines.append("")
    return lines


def _shown(reason: str) -> str:
    """Return a reason as text of Markdown."""
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
