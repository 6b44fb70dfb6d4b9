"""Tests of the table of proved layouts: its page, its file, and some rows that are run again."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.command import Served
from support.served import Server

from axonlaunch.models.hf.reading import library
from axonlaunch.verification.proofs.proved_layouts import proved_table

ROOT = Path(__file__).parents[3]
BENCHES = ROOT / "scripts" / "benches"
PAGE = ROOT / "axonlaunch" / "docs" / "huggingface.md"
AGAIN = [
    ("llama", "tensor 4"),
    ("gpt2", "zero bubble 2"),
    ("gemma3_text", "context 2"),
    ("bloom", "context 2"),
    ("biogpt", "sequence 2"),
    ("mamba", "tensor 2"),
    ("gpt_oss", "export"),
]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))


def test_the_page_has_the_settings_of_every_proved_layout() -> None:
    rows = re.findall(r"^\| ([^|`]+) \| [^|]+ \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    layouts = proved_table().layouts.items()
    assert dict(rows) == {
        name: " ".join(word for word in overrides if not word.startswith("launch."))
        for name, overrides in layouts
    }


@pytest.mark.usefixtures("benches")
def test_rewriting_rows_keeps_hf_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_table: Any = importlib.import_module("hf_table")
    table, rows, data = (
        proved_table(),
        list(hf_table.shipped()),
        hf_table.proved_layouts.FILE.read_text(),
    )
    monkeypatch.setattr(hf_table.proved_layouts, "FILE", tmp_path / "proved_layouts.json")
    hf_table.write(rows, versions=table.versions, classes=table.classes, layouts=table.layouts)
    proved_table.cache_clear()
    assert hf_table.proved_layouts.FILE.read_text() == data


@pytest.mark.usefixtures("benches")
def test_the_table_has_the_layouts_and_the_classes_of_the_version_that_it_names() -> None:
    bench: Any = importlib.import_module("hf")
    kinds = importlib.import_module("hf_tiny").model_types()
    assert set(proved_table().layouts) == set(bench.LAYOUTS)
    if library.transformers().__version__ == proved_table().versions["transformers"]:
        assert set(proved_table().families) <= set(kinds)
        assert proved_table().classes == len(kinds)


def test_no_reason_names_a_file_of_the_machine_that_it_was_found_on() -> None:
    reasons = [
        why for family in proved_table().families.values() for why in family.refused.values()
    ]
    assert [why for why in reasons if re.search(r"(^|[\s(])/\w+/", why)] == []


LEAST = {
    "fsdp 2": 150,
    "zero1 2": 150,
    "tensor 2": 95,
    "sequence 2": 95,
    "pipeline 2": 40,
    "context 2": 25,
}


def test_no_layout_is_proved_for_fewer_classes_than_promised() -> None:
    table = proved_table()
    assert len(table.families) >= table.classes - 2
    equal = {
        layout: sum(layout not in family.refused for family in table.families.values())
        for layout in LEAST
    }
    assert all(equal[layout] >= least for layout, least in LEAST.items()), equal


@pytest.fixture
def of_its_version() -> None:
    if library.transformers().__version__ != proved_table().versions["transformers"]:
        pytest.skip("the table is of another version of transformers")


@pytest.mark.slow
@pytest.mark.usefixtures("benches", "of_its_version")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kind", "layout"), AGAIN)
def test_rerun_row_equals_hf_table(kind: str, layout: str) -> None:
    bench: Any = importlib.import_module("hf")
    row = bench.prove(kind, layout)
    reason = proved_table().families_by_type[kind].refused.get(layout)
    assert (row.outcome == "equal") == (reason is None), row.reason
    if reason is not None:
        assert reason == f"{row.outcome}: {row.reason}"


@pytest.mark.usefixtures("of_its_version")
def test_ls_hf_shows_proved_layouts(tmp_path: Path, server: Server) -> None:
    axonlaunch = Served(tmp_path, server)
    shown = axonlaunch("ls", "hf", "--like", "bloom").stdout
    assert "bloom, context 2: refused: " in shown
    refused = axonlaunch("ls", "hf", "--like", "xlnet").stdout
    assert refused.count("xlnet, all layouts: refused: ") == 1
    listed = json.loads(axonlaunch("ls", "hf", "--json").stdout)
    named = proved_table().families_by_type
    counted = axonlaunch("ls", "hf").stdout.partition(f"yes (of {len(named)})")[2].split()
    assert int(counted[0]) == sum("fsdp 2" not in family.refused for family in named.values())
    assert listed["versions"] == proved_table().versions
    assert "fsdp 2" in listed["model_types"]["llama"]["proved"]
    assert "did you mean llama" in axonlaunch("ls", "hf", "--like", "llamma", status=2).stderr
