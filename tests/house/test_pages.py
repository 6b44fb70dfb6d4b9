"""The README and every page of the documentation: their examples run, their links exist."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support import served
from support.command import Served
from support.configured import run_config
from support.served import Server

import axonlaunch as ax
from axonlaunch.config import ConfigError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "axonlaunch" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
MORE_PAGES = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "scripts/benches/README.md",
    "tests/parity/README.md",
)
ALL_PAGES = [*PAGES, *(ROOT / page for page in MORE_PAGES)]
BIN = Path(sys.executable).parent
DIFFERING = ("axonlaunch checkpoint diff ", "axonlaunch diff runs/counting ")
"""Commands that find a difference."""
COSTLY = ("axonlaunch plan ", "axonlaunch train strategy=auto")
"""Commands that trace many layouts: ten seconds each."""
AT_ONCE = ("README",)
"""Pages whose blocks run in every test run: those of any other page take up to half a minute."""
# Run by continuous integration, and during installation.
NOT_RUN_HERE = ("scripts/quickstart ", ". .venv/", "scripts/test ")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def lines(page: Path) -> list[str]:
    return [line for block in blocks(page, "bash") for line in block.splitlines() if line]


def pages_with(language: str, *, at_once: Sequence[str] | None = None) -> list[object]:
    """Return pages; all except the named ones are marked slow."""

    def marks(page: Path) -> list[pytest.MarkDecorator]:
        return [] if at_once is None or page.stem in at_once else [pytest.mark.slow]

    pages = [page for page in PAGES if blocks(page, language)]
    return [pytest.param(page, id=page.stem, marks=marks(page)) for page in pages]


def shortened(command: str, page: Path) -> list[str]:
    """Return the arguments of a command, with sizes reduced as far as the result stays the same.

    A run does a fifth of the page's steps, so that one run can resume another. Ranks are threads,
    except in the README and on pages that choose a launcher or backend.
    """
    arguments = shlex.split(command)
    small = ["model.num_hidden_layers=2", "data.sequence_length=64"]
    # several stages per rank
    has_more_stages = any("pipeline.schedule=" in word for word in arguments)
    narrow = ["model.hidden_size=32", "model.num_attention_heads=2", *small[has_more_stages:]]
    is_default = not any(word.startswith(("model=", "experiment=")) for word in arguments)
    if arguments[1] == "verify":
        return [*arguments, *(narrow if is_default else []), "--steps=1"]
    if arguments[1] == "estimate":
        return [*arguments, *small]
    if arguments[1] == "plan":
        strategy = ["data_parallel=ddp", "tensor.degree=8", "pipeline.degree=1"]
        rest = ["train.micro_batch_size=1", "train.activation_checkpointing=full"]
        return [*arguments, *small, *(f"strategy.{key}" for key in strategy), *rest]
    if arguments[1] != "train" or "--render" in arguments:
        return arguments
    if "strategy=auto" in arguments:  # a few layouts to search
        arguments += ["strategy.data_parallel=ddp", "strategy.pipeline.degree=1"]
        arguments += ["strategy.tensor.degree=1", "train.activation_checkpointing=none"]
        arguments.append("train.micro_batch_size=4")
    train_settings = dict(word.split("=", 1) for word in arguments if word.startswith("train."))
    length = f"train.steps={int(train_settings.get('train.steps', 20)) // 5}"
    length = "train.epochs=0.2" if "train.epochs" in train_settings else length
    arguments = [
        word for word in arguments if not word.startswith(("train.steps=", "train.epochs="))
    ]
    if is_default:
        arguments += narrow
    elif "model=llama_debug" in arguments:
        arguments += small
    elif "model=hf" in arguments:  # its import takes seconds in each process
        arguments.append("launch.backend=mock")
    if "launch.backend=mock" not in arguments:  # two processes show the same as four
        arguments = ["launch.nproc=2" if word == "launch.nproc=4" else word for word in arguments]
    asks_for_ranks = any(word.startswith("launch.") for word in arguments)
    if page.stem != "README" and not asks_for_ranks:  # the README's are processes
        arguments.append("launch.backend=mock")
    less = ["train.eval_batches=1"]
    return [*arguments, length, *less]


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the blocks that name their file; return Python blocks without a file name."""
    (folder / "README.md").write_text((ROOT / "README.md").read_text())  # text to train on
    scripts = []
    for block in [*blocks(page, "python"), *blocks(page, "yaml")]:
        named = re.match(r"# ([\w/]+\.(?:py|yaml))\n", block)
        if named is None:
            scripts.append(block)
            continue
        (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / named[1]).write_text(block.partition("\n")[2])
    return [script for script in scripts if script not in blocks(page, "yaml")]


def run_python(path: Path, folder: Path, server: Server) -> None:
    ran = served.Forked(
        served.served_script, server, path.name, folder=folder, environment=dict(os.environ)
    )
    _, errors = ran.communicate(timeout=240)  # 45 s on two quiet cores for the Python API
    assert ran.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash", at_once=AT_ONCE))
def test_every_command_of_a_page_runs_in_the_order_of_the_page(
    page: Path, tmp_path: Path, server: Server
) -> None:
    axonlaunch = Served(tmp_path, server)
    write_files(page, tmp_path)
    run_before = [] if page.stem == "README" else lines(ROOT / "README.md")  # not twice
    for command in [line for line in lines(page) if line not in run_before]:
        if command.startswith(COSTLY):
            continue  # has a separate test
        if command.startswith("python "):
            run_python(tmp_path / command.removeprefix("python "), tmp_path, server)
        elif command.startswith("axonlaunch "):
            differs = command.startswith(DIFFERING)
            axonlaunch(*shortened(command, page)[1:], status=int(differs))
        else:
            assert f"{command} ".startswith(NOT_RUN_HERE), f"{command} is not run by any test"


def test_the_readme_starts_from_a_clone_and_installs_no_unreleased_package() -> None:
    commands = lines(ROOT / "README.md")
    assert commands[0].startswith("scripts/quickstart ")
    assert not any("pip install axonlaunch" in command for command in commands)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    sorted({line for page in PAGES for line in lines(page) if line.startswith(COSTLY)}),
)
def test_a_command_that_looks_for_layouts_runs(
    command: str, tmp_path: Path, server: Server
) -> None:
    Served(tmp_path, server)(*shortened(command, PAGES[0])[1:])


@pytest.mark.parametrize("page", pages_with("python", at_once=AT_ONCE))
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, server: Server) -> None:
    for number, script in enumerate(write_files(page, tmp_path)):
        path = tmp_path / f"script_{number}.py"
        path.write_text(script)
        run_python(path, tmp_path, server)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS.glob("*.md")], ids=lambda p: p.stem)
def test_the_yaml_and_toml_of_a_page_are_well_formed(page: Path) -> None:
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict)
    for block in blocks(page, "toml"):
        assert tomllib.loads(block)


def test_errors_on_pages_match_printed_errors(tmp_path: Path, server: Server) -> None:
    axonlaunch = Served(tmp_path, server)
    shown = [
        block
        for page in PAGES
        for block in blocks(page, "text")
        if block.startswith("$ ") and "error:" in block
    ]
    assert shown
    for block in shown:
        command, _, expected = block.removeprefix("$ ").partition("\n")
        assert axonlaunch(*shlex.split(command)[1:], status=2).stderr == expected


def shown_alone() -> list[str]:
    """Return commands that pages show and no test runs, because they need files of the reader."""
    shown = "\n".join(block for page in PAGES for block in blocks(page, "text"))
    commands = re.findall(
        r"^(?:(?:torchrun|mpirun|srun) .*)?axonlaunch [a-z].*", shown, re.MULTILINE
    )
    return sorted(set(commands))


@pytest.mark.parametrize("command", shown_alone())
def test_each_page_command_is_complete_except_for_user_files(command: str) -> None:
    from axonlaunch.cli.app import app

    # not downloaded from the hub
    words = shlex.split(command.replace("=Qwen/", "=./"), comments=True)
    name, *arguments = words[words.index("axonlaunch") + 1 :]
    if name == "train":
        try:
            run_config(arguments)
        except ConfigError as error:
            named = {problem.key for problem in error.problems}
            assert named <= {"model.path", "data.files", "tokenizer.path", "adapter.path"}
    else:
        parser: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
        while hasattr(parser, "commands"):
            parser = parser.commands[arguments.pop(0)]
        parser.make_context(name, arguments)  # raises for an unknown option


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "strategies.md"], ids=["README", "doc"]
)
def test_every_strategy_is_in_the_tables(page: Path) -> None:
    from axonlaunch.config import Composer

    table = page.read_text().partition("| `strategy=` |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))
    assert listed == set(Composer().options("strategy"))


@pytest.mark.parametrize("group", ["optimizer", "scheduler", "loggers"])
def test_every_registered_option_is_on_its_page(group: str) -> None:
    from axonlaunch.config import Composer

    named = set(re.findall(r"[\w]+", " ".join(code(DOCS / "configuration.md"))))
    assert set(Composer().options(group)) <= named


def test_every_public_name_is_on_a_page() -> None:
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    assert set(ax.__all__) - words == set()


def code(page: Path) -> list[str]:
    """Return the text in backticks on a page."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


def test_the_readme_fits_in_ten_kilobytes() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", " ".join(text.split()))


def anchor(heading: str) -> str:
    """Return the anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: there is no such file"
        text = target.read_text() if part else ""
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        assert not part or part in map(anchor, headings), f"{link}: there is no such heading"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            left += [(page.parent / x.partition("#")[0]).resolve() for x in links(page)]
    assert {page for page in PAGES if page not in reached} == set()


def test_the_page_about_architecture_has_the_layers_that_the_linter_keeps() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract, *_ = project["tool"]["importlinter"]["contracts"]
    drawing = blocks(DOCS / "architecture.md", "text")[0].splitlines()
    assert [re.split(r"\s{2,}", line)[0] for line in drawing] == contract["layers"]


def test_the_trunk_of_the_page_about_architecture_is_that_of_the_code() -> None:
    trunk = blocks(DOCS / "architecture.md", "text")[1]
    calls = re.findall(r"^(\S+\.py): (\w+) ", trunk, flags=re.MULTILINE)
    assert len(calls) >= 8
    for path, function in calls:
        source = (ROOT / "axonlaunch" / path).read_text()
        assert re.search(rf"^ *def {function}\(", source, flags=re.MULTILINE), (path, function)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    examples = {"my_models.py", "my_configs/experiment/mine.yaml"}
    files = [*ROOT.glob("axonlaunch/**/*.py"), *ROOT.glob("tests/**/*.py")]
    names = {str(path.relative_to(ROOT)) for path in files}
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in set(re.findall(r"`([\w/]+\.py)(?:\b|`)", text)) - examples:
        assert any(f"/{path}".endswith(f"/{name}") for path in names), f"{name} is not there"
