"""Rules of the code that no linter has."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import axonlaunch
from axonlaunch.config.schema import REGISTRIES
from axonlaunch.system.targets import load_target

PACKAGE = Path(axonlaunch.__file__).parent
MOST_PAIRS = 74
"""Of packages, the first of which imports something of the second."""
MODULE = re.compile(r"axonlaunch(\.\w+){2,}")
TARGET = re.compile(r"(axonlaunch|torch)(\.\w+)+:\w+")

CHANGED_COPIES = {
    *("changed", "completed", "copied", "enlarged", "extended", "mapped", "merged", "moved"),
    *("numbered", "orthogonalized", "placed", "prepared", "reduced", "replaced", "resolved"),
    *("rounded", "scaled", "shifted", "shortened", "starred", "thinned", "turned", "uncounted"),
}
"""What functions return that have such a name."""
IRREGULAR = {"built", "found", "given", "held", "kept", "known", "made", "seen", "sent", "written"}


def test_no_file_of_the_package_is_longer_than_the_house_allows() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {path.name for path, lines in lengths.items() if lines > 400}


def test_no_public_name_stands_for_two_things_in_two_modules() -> None:
    """But for what modules of one kind all have, by which others call them."""
    of_commands, of_models = {"HELP", "EXAMPLES", "command"}, {"SPEC"}
    of_launchers, of_processes = {"check", "launch"}, {"main"}
    homes: dict[str, set[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for name in _defined(node):
                homes.setdefault(name, set()).add(path)
    shared = {name for name, where in homes.items() if len(where) > 1 and name[0] != "_"}
    assert shared <= of_commands | of_models | of_launchers | of_processes


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        inside = [name for target in node.targets for name in ast.walk(target)]  # A, B = 1, 2
    else:
        inside = [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for name in inside if isinstance(name, ast.Name)]


def test_no_ten_equal_lines_stand_twice() -> None:
    runs = Counter(run for path in PACKAGE.rglob("*.py") for run in _runs_of_lines(path, 10))
    assert not [run for run, times in runs.items() if times > 1]


def _runs_of_lines(path: Path, length: int) -> Iterator[tuple[str, ...]]:
    lines = [text for line in path.read_text().splitlines() if (text := line.strip())]
    for first in range(len(lines) - length + 1):
        yield tuple(lines[first : first + length])


def test_every_text_that_names_code_leads_to_it() -> None:
    """No type checker sees that ``"package.module:function"`` was renamed there alone."""
    listed = {
        registry.entry(name).target
        for registry in REGISTRIES.values()
        for name in registry.names()
        if registry.is_included(name)
    }
    texts = {text for text in {*_written(), *listed} if isinstance(text, str)}
    modules = {text for text in texts if MODULE.fullmatch(text)}
    targets = {text for text in texts if TARGET.fullmatch(text)}
    assert len(modules) > 10
    assert len(targets) > 60
    assert not {module for module in modules if not importlib.util.find_spec(module)}
    for target in targets:
        assert load_target(target) is not None


def _written() -> set[object]:
    """Return the constants of the package."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    constants = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    ]
    return {constant.value for constant in constants}


def test_no_folder_has_more_rooms_than_a_picture_of_it() -> None:
    for folder in ("engines", "launch", "planning"):
        rooms = [path for path in (PACKAGE / folder).iterdir() if _is_room(path)]
        assert len(rooms) <= 12, folder


def test_packages_import_no_more_of_each_other_than_they_did() -> None:
    """Where one has to, another that is not needed goes: a picture of more can't be read."""
    pairs = {
        (path.relative_to(PACKAGE).parts[0], name.split(".")[1])
        for path in PACKAGE.rglob("*/*.py")
        for name in _imported(ast.parse(path.read_text()))
        if name.startswith("axonlaunch.")
    }
    assert len({pair for pair in pairs if pair[0] != pair[1]}) <= MOST_PAIRS


def _is_room(path: Path) -> bool:
    is_folder = path.is_dir() and path.name != "__pycache__"
    return is_folder or (path.suffix == ".py" and path.name != "__init__.py")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "axonlaunch":
            yield from (f"axonlaunch.{each.name}" for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_no_function_has_a_participle_for_a_name() -> None:
    """But for those that return a changed copy of what they are given."""
    named = {
        name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and not _is_property(node)
        if (name := node.name.strip("_")).endswith("ed") or name in IRREGULAR
        if "_" not in name
    }
    assert named == CHANGED_COPIES


def _is_property(function: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)
