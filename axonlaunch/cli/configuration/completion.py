"""``axonlaunch completion``: completes commands, options, keys, values and names of runs in shells.

The scripts of the shells call ``axonlaunch completion --line``, which imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from axonlaunch.cli.shared.options import refuse

HELP = "Print the completion script of bash or zsh. It completes commands, keys, values and runs."
EXAMPLES = """Examples:

\b
  eval "$(axonlaunch completion bash)"      # in ~/.bashrc
  eval "$(axonlaunch completion zsh)"       # in ~/.zshrc, after compinit
"""
_BASH = """_axonlaunch() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
  local word="${line##* }"
  COMPREPLY=($(axonlaunch completion --line "$line" 2>/dev/null))
  # Readline replaces only what follows the last of these characters.
  if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then
    local kept="${word%"${word##*=}"}"
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
  fi
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]]; then compopt -o nospace; fi
}
complete -o default -F _axonlaunch axonlaunch
"""
_ZSH = """_axonlaunch() {
  local -a found
  found=("${(@f)$(axonlaunch completion --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
  found=(${found:#})
  if (( ${#found} )); then
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
  else
    _files
  fi
}
compdef _axonlaunch axonlaunch
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH}
_OF_RUNS = {"run", "runs", "run_dir", "folder", "first", "second"}
"""Names of arguments of commands that are folders of runs."""


def command(
    context: typer.Context,
    shell: Annotated[
        str | None, typer.Argument(metavar="SHELL", help="bash or zsh.", show_default=False)
    ] = None,
    line: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Print the words that complete this line, for the scripts.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print a shell's script, or the words that complete a line."""
    if line is not None:
        sys.stdout.writelines(
            f"{word}\n" for word in completions(line, context.find_root().command)
        )
    elif shell in _SCRIPTS:
        sys.stdout.write(_SCRIPTS[str(shell)])
    else:
        refuse(f"SHELL={shell}: is not supported; use bash or zsh")


def completions(line: str, root: Any) -> list[str]:
    """Return the words that complete the last word of a line, sorted.

    Args:
        line: Line up to the cursor, ``axonlaunch train strategy=f``.
    """
    *words, last = line.split(" ")
    words = [word for word in words[1:] if word]
    parser: Any = root
    while hasattr(parser, "commands"):
        commands = parser.commands
        named = [word for word in words if not word.startswith("-")]
        if not named:
            return sorted(name for name in commands if name.startswith(last))
        if named[0] not in commands:
            return []
        words = words[words.index(named[0]) + 1 :]
        parser = commands[named[0]]
    if last.startswith("-"):
        options = [name for parameter in parser.params for name in parameter.opts]
        return sorted(name for name in options if name.startswith(last) and name != last)
    names = {parameter.name for parameter in parser.params}
    candidates = [*_keys(last)] if "overrides" in names else []
    if parser.name == "help":
        candidates += [path.stem for path in (Path(__file__).parents[2] / "docs").glob("*.md")]
    if names & _OF_RUNS and "kind" not in names:
        candidates += _runs()
    return sorted({word for word in candidates if word.startswith(last) and word != last})


def _keys(last: str) -> Iterator[str]:
    """Yield settings that begin with a word, up to the next dot or with their values."""
    from axonlaunch.cli.configuration.config import schema_of_files

    prefix = "+" if last.startswith("+") else ""
    key, equals, _ = last.removeprefix("+").partition("=")
    values = dict(_values(schema_of_files(), ""))
    if equals:
        if key in ("checkpoint.resume", "model.weights"):
            yield from (f"{prefix}{key}={run}" for run in _runs())
        yield from (f"{prefix}{key}={value}" for value in values.get(key, []))
        return
    for name in values:
        inside = name[len(key) :].find(".") if name.startswith(key) else -1
        if inside >= 0:
            yield f"{prefix}{name[: len(key) + inside]}."
        else:
            yield f"{prefix}{name}="


def _values(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each dotted key below a schema with the values that it lists."""
    found: dict[str, list[str]] = {}
    inside: list[tuple[str, dict[str, Any]]] = []
    for name, described in _properties(schema):
        key = f"{prefix}{name}"
        texts = found.setdefault(key, [])
        texts += [text for text in _values_of(described) if text not in texts]
        inside.append((key, described))
    yield from found.items()
    for key, described in inside:
        yield from _values(described, f"{key}.")


def _properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from schema.get("properties", {}).items()
    for each in schema.get("anyOf", []):
        yield from _properties(each)


def _values_of(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the values that a schema lists, in the syntax of overrides."""
    from axonlaunch.config.problems.errors import plain

    yield from (plain(value) for value in schema.get("enum", []))
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for each in schema.get("anyOf", []):
        yield from _values_of(each)


def _runs() -> list[str]:
    from axonlaunch.config import CONFIG

    return [str(path.parent) for path in Path("runs").glob(f"**/{CONFIG}")]
