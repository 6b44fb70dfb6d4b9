"""The table of what is proved: its page is that of its data, and some rows are run again."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import Served
from covers import every
from served import Server

from axonlaunch.models.hf import library
from axonlaunch.verification.proved import proved_table

BENCHES = Path(__file__).parents[3] / "scripts" / "benches"
AGAIN = [
    ("llama", "tensor 4"),
    ("gpt2", "zero bubble 2"),
    ("gemma3_text", "context 2"),
    ("bloom", "context 2"),
    ("mamba", "tensor 2"),
    ("gpt_oss", "export"),
]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))


@pytest.mark.usefixtures("benches")
def test_the_page_is_what_the_data_make_of_it() -> None:
    page: Any = importlib.import_module("hf_page")
    assert page.PAGE.read_text() == page.page(proved_table()), "run scripts/bench hf"


@pytest.mark.usefixtures("benches")
def test_the_table_is_written_again_from_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page: Any = importlib.import_module("hf_page")
    table, rows = proved_table(), list(page.shipped())
    data, text = page.proved.FILE.read_text(), page.PAGE.read_text()
    monkeypatch.setattr(page.proved, "FILE", tmp_path / "proved.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "huggingface.md")
    page.write(rows, versions=table.versions, classes=table.classes, layouts=table.layouts)
    proved_table.cache_clear()
    assert (page.proved.FILE.read_text(), page.PAGE.read_text()) == (data, text)


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


LEAST = {"fsdp 2": 150, "zero1 2": 150, "tensor 2": 95, "pipeline 2": 40, "context 2": 25}


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


@pytest.mark.deferred(keep=1)
@pytest.mark.usefixtures("benches", "of_its_version")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kind", "layout"), every(4, AGAIN, start=1))
def test_a_row_that_is_run_again_gives_what_the_table_says(kind: str, layout: str) -> None:
    bench: Any = importlib.import_module("hf")
    row = bench.prove(kind, layout)
    reason = proved_table().named[kind].refused.get(layout)
    assert (row.outcome == "equal") == (reason is None), row.reason
    if reason is not None:
        assert reason == f"{row.outcome}: {row.reason}"


@pytest.mark.usefixtures("of_its_version")
def test_ls_shows_what_is_proved(tmp_path: Path, server: Server) -> None:
    axonlaunch = Served(tmp_path, server)
    shown = axonlaunch("ls", "hf", "--like", "bloom").stdout
    assert "bloom, context 2: refused: " in shown
    refused = axonlaunch("ls", "hf", "--like", "xlnet").stdout
    assert refused.count("xlnet, every layout: refused: ") == 1
    listed = json.loads(axonlaunch("ls", "hf", "--json").stdout)
    assert listed["versions"] == proved_table().versions
    assert "fsdp 2" in listed["model_types"]["llama"]["proved"]
    assert "did you mean llama" in axonlaunch("ls", "hf", "--like", "llamma", status=2).stderr
