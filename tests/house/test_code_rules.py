"""Rules of the code that no linter has."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from support.package_source import PACKAGE, Source, sources

from axonlaunch.config.precision import NUMBER_FORMATS, PRECISIONS
from axonlaunch.config.schema import REGISTRIES

MOST_PAIRS = 74
"""Number of pairs of packages where the first imports something from the second."""
MOST_FILES_WITH_PRECISION_NAMES = 6
TESTS = Path(__file__).parents[1]
MODULE = re.compile(r"axonlaunch(\.\w+){2,}")
TARGET = re.compile(r"(axonlaunch|torch)(\.\w+)+:\w+")
MARKS = {"filterwarnings", "parametrize", "processes", "skipif", "slow", "usefixtures"}
"""Marks of tests. A time limit is set once, in ``pyproject.toml``."""
CHANGED_COPIES = {
    *("changed", "completed", "copied", "enlarged", "extended", "mapped", "merged", "moved"),
    *("orthogonalized", "reduced", "replaced", "resolved"),
    *("rounded", "scaled", "shifted", "shortened", "thinned", "uncounted"),
}
"""Return types of functions with such names."""
VAGUE = {"asked", "before", "known", "made", "own", "place", "seen", "theirs", "where", "whole"}
"""Names of variables, arguments and attributes that do not say what they hold."""
IRREGULAR = {"built", "found", "given", "held", "kept", "known", "made", "seen", "sent", "written"}


def test_no_file_of_the_package_or_the_tests_has_more_than_600_lines() -> None:
    """Above 400 lines, scripts/check prints a warning."""
    lengths = {source.path: source.length for source in sources()} | {
        str(file.relative_to(TESTS.parent)): len(file.read_text().splitlines())
        for file in TESTS.rglob("*.py")
    }
    assert not {file for file, length in lengths.items() if length > 600}


def test_public_name_is_defined_in_one_module() -> None:
    """Except names that all modules of one kind have, which are called by module.

    Public functions for scripts have the names of the functions that they call.
    """
    of_commands, of_models = {"HELP", "EXAMPLES", "command"}, {"SPEC"}
    of_launchers, of_processes = {"check", "launch"}, {"main"}
    for_scripts = {"build_engine", "estimate", "load", "verify"}
    homes = Counter(name for source in sources() for name in source.top)
    shared = {name for name, files in homes.items() if files > 1 and name[0] != "_"}
    assert shared <= of_commands | of_models | of_launchers | of_processes | for_scripts
    assert all(homes[name] == 2 for name in for_scripts)


def test_ten_equal_lines_are_not_repeated() -> None:
    runs = Counter(
        tuple(source.lines[first : first + 10])
        for source in sources()
        for first in range(len(source.lines) - 9)
    )
    assert not [run for run, times in runs.items() if times > 1]


def test_every_text_that_names_code_leads_to_it() -> None:
    """No type checker notices if a ``"package.module:function"`` text misses a renaming."""
    of_entries = {
        str(registry.entry(name).target)
        for registry in REGISTRIES.values()
        for name in registry.names()
        if registry.is_included(name)
    }
    texts = of_entries.union(*(source.texts for source in sources()))
    modules = {text for text in texts if MODULE.fullmatch(text)}
    targets = {text for text in texts if TARGET.fullmatch(text)}
    assert len(modules) > 10
    assert len(targets) > 50
    assert not {module for module in modules if not _file(module) and not _folder(module).is_dir()}
    assert not {target for target in targets if not _is_there(*target.split(":"))}


def _is_there(module: str, name: str) -> bool:
    if module == "torch.optim":
        return hasattr(torch.optim, name)
    source = _file(module)
    return source is not None and name in source.top


def _folder(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")[1:])


def _file(module: str) -> Source | None:
    paths = {f"{_folder(module)}.py", str(_folder(module) / "__init__.py")}
    return next((each for each in sources() if str(PACKAGE / each.path) in paths), None)


def test_no_folder_has_more_than_twelve_entries() -> None:
    """The package itself has more: one folder for each layer that import-linter checks."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    entries = {
        folder: [
            entry
            for entry in folder.iterdir()
            if entry.suffix == ".py" or any(entry.glob("**/*.py"))
            if entry.name != "__init__.py"
        ]
        for folder in folders
    }
    assert not {folder: len(inside) for folder, inside in entries.items() if len(inside) > 12}


def test_packages_import_no_more_of_each_other_than_they_did() -> None:
    """A new import needs the removal of another one: a larger picture is unreadable."""
    pairs = {
        (source.path.split("/")[0], module.split(".")[1])
        for source in sources()
        for module in source.imports
        if "/" in source.path and module.startswith("axonlaunch.")
    }
    assert len({pair for pair in pairs if pair[0] != pair[1]}) <= MOST_PAIRS


def test_no_function_has_a_participle_for_a_name() -> None:
    """Except functions that return a changed copy of an argument."""
    names = {name.strip("_") for source in sources() for name in source.functions}
    bare = {name for name in names if "_" not in name}
    participles = {name for name in bare if name.endswith("ed") or name in IRREGULAR}
    assert participles == CHANGED_COPIES


def test_no_variable_has_a_vague_name() -> None:
    names = {
        (source.path, name) for source in sources() for name in source.defined | source.arguments
    }
    assert not {(path, name) for path, name in names if name.strip("_") in VAGUE}


def test_only_class_methods_have_names_that_begin_with_of() -> None:
    names = {
        (source.path, name)
        for source in sources()
        for name in source.functions - source.classmethods
    }
    assert not {(path, name) for path, name in names if re.match(r"of(_|$)", name.strip("_"))}


def test_names_of_precisions_are_in_few_files() -> None:
    """Other files use the records of ``config.precision``, except converters of foreign files."""
    names = {*NUMBER_FORMATS, *PRECISIONS}
    constant = re.compile(r"\bFP32\b|\bMIXED_PRECISION\.name\b|\bhas_bf16=(True|False)\b")
    files = {
        source.path
        for source in sources()
        if names & source.texts or any(constant.search(line) for line in source.lines)
        if not source.path.startswith("config/validation/other_tools/")
    }
    assert "config/precision.py" in files
    assert len(files) <= MOST_FILES_WITH_PRECISION_NAMES, files


def test_members_of_datasets_are_not_looked_up_by_name() -> None:
    """``data.datasets.user_datasets.members`` reads those that a user's dataset may omit."""
    lookup = re.compile(r"\b(?:getattr|hasattr)\((?:self\._)?(?:dataset|pairs|held_out)\b")
    assert not {s.path for s in sources() if any(lookup.search(line) for line in s.lines)}


def test_tests_have_only_known_marks() -> None:
    used = {
        (mark, str(file.relative_to(TESTS)))
        for file in TESTS.rglob("*.py")
        for mark in re.findall(r"pytest\.mark\.(\w+)", file.read_text())
    }
    assert not {(mark, file) for mark, file in used if mark not in MARKS}, (
        "write slow for deferred, and remove costly and timeout: see CONTRIBUTING.md"
    )
