"""Parses the package's source files once, for all tests of its rules."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import axonlaunch

PACKAGE = Path(axonlaunch.__file__).parent


@dataclass(frozen=True)
class Source:
    """A parsed source file.

    Attributes:
        path: Path inside the package.
        lines: Stripped lines of text, without empty ones.
        length: Number of lines.
        texts: String constants.
        imports: Qualified names of imported modules.
        top: Names defined at module level.
        defined: All names defined in the file, including attributes.
        functions: Names of functions that are not properties.
        classmethods: Names of class methods.
        arguments: Names of arguments of functions.
        of_torch: Qualified names that are imported from torch or read from its modules.
        attributes: Attributes read from other objects, also by ``getattr``.
    """

    path: str
    lines: list[str]
    length: int
    texts: set[str]
    imports: set[str]
    top: set[str]
    defined: set[str]
    functions: set[str]
    classmethods: set[str]
    arguments: set[str]
    of_torch: set[str]
    attributes: set[str]


@functools.cache
def sources() -> list[Source]:
    return [_read(path) for path in sorted(PACKAGE.rglob("*.py"))]


def _read(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = [*ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    torch = _names_of_torch(nodes) if "torch" in text else {}
    dotted = {id(node): name for node in attributes if (name := _dotted(node, torch))}
    lines = text.splitlines()
    return Source(
        path=str(path.relative_to(PACKAGE)),
        lines=[stripped for line in lines if (stripped := line.strip())],
        length=len(lines),
        texts={
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        },
        imports={name for node in nodes for name in _imported(node)},
        top={name for node in tree.body for name in _defined(node)},
        defined={name for node in nodes for name in _defined(node)}
        | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)},
        functions={node.name for node in functions if not _is_decorated(node, "property")},
        classmethods={node.name for node in functions if _is_decorated(node, "classmethod")},
        arguments={node.arg for node in nodes if isinstance(node, ast.arg)},
        of_torch={*torch.values(), *dotted.values()},
        attributes={node.attr for node in attributes if id(node) not in dotted} | _asked(nodes),
    )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        full = [f"axonlaunch.{each.name}" for each in node.names]
        return full if node.module == "axonlaunch" else [node.module or ""]
    return [each.name for each in node.names] if isinstance(node, ast.Import) else []


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        inside = [name for target in node.targets for name in ast.walk(target)]  # A, B = 1, 2
    else:
        inside = [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for name in inside if isinstance(name, ast.Name)]


def _is_decorated(function: ast.FunctionDef, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in function.decorator_list)


def _names_of_torch(nodes: list[ast.AST]) -> dict[str, str]:
    """Map the names that a file imports from torch to qualified names."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            of_torch = [each for each in node.names if each.name.split(".")[0] == "torch"]
            names |= {each.asname or each.name: each.name for each in of_torch}
    names |= {"torch": "torch"} if names else {}
    for node in nodes:  # _cpp: Any = torch._C._distributed_c10d
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (name := _dotted(node.value, names)):
                names.setdefault(target.id, name)
    return names


def _dotted(node: ast.expr, known_names: dict[str, str]) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known_names:
        return None
    return ".".join([known_names[node.id], *reversed(names)])


def _asked(nodes: list[ast.AST]) -> set[str]:
    """Return the names that are read by ``getattr`` and ``hasattr``."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    asking = [call for call in calls if getattr(call.func, "id", "") in {"getattr", "hasattr"}]
    names = [call.args[1] for call in asking]
    return {str(name.value) for name in names if isinstance(name, ast.Constant)}
