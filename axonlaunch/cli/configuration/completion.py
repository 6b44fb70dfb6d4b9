"""``axonlaunch completion``: completes commands, options, keys, values and names of runs in shells.

The scripts of the shells call ``axonlaunch completion --line``, which imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from axonlaunch.cli.shared.options import refuse, words_of

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
        str | None,
        typer.Argument(
            metavar="SHELL",
            help="bash or zsh.",
            show_default=False,
            autocompletion=words_of(*_SCRIPTS),
        ),
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
        refuse("is not supported; use bash or zsh", option="SHELL", value=shell)


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
    candidates = _candidates(parser, words[-1] if words else "", last)
    return sorted({word for word in candidates if word.startswith(last) and word != last})


def _candidates(parser: Any, previous: str, last: str) -> Iterator[str]:
    """Yield words that a command accepts after another word.

    Args:
        parser: Parser of the command.
        previous: Word before the last one; empty if that is the command's name.
        last: Text that the word begins with.
    """
    option, equals, text = last.partition("=")
    if (parameter := _option(parser, previous)) is not None:
        yield from _values_of_option(parser, parameter, last)
    elif equals and (parameter := _option(parser, option)) is not None:
        for value in _values_of_option(parser, parameter, text):
            yield f"{option}={value}"
    elif last.startswith("-"):
        yield from (name for parameter in parser.params for name in parameter.opts)
    else:
        yield from _arguments(parser, last)


def _option(parser: Any, name: str) -> Any:
    """Return the option of a command that has this name and takes a value; None if none has."""
    for parameter in parser.params:
        is_option = parameter.param_type_name == "option"
        if is_option and name in parameter.opts and not parameter.is_flag:
            return parameter
    return None


def _values_of_option(parser: Any, parameter: Any, text: str) -> Iterator[str]:
    """Yield the values that an option lists; none for files, which the shell completes itself."""
    for item in parameter.shell_complete(typer.Context(parser), text):
        if item.type == "plain":
            yield item.value


def _arguments(parser: Any, last: str) -> Iterator[str]:
    """Yield settings, runs and words of lists, as the arguments of a command accept them."""
    names = {parameter.name for parameter in parser.params}
    if "overrides" in names:
        yield from _settings(last)
    if names & _OF_RUNS and "kind" not in names:
        yield from _runs()
    for parameter in parser.params:
        if parameter.param_type_name == "argument":
            yield from _values_of_option(parser, parameter, last)


def _settings(last: str) -> Iterator[str]:
    """Yield settings that begin with a word, up to the next dot or with their values."""
    from axonlaunch.cli.configuration.keys_and_values import keys_and_values

    prefix = "+" if last.startswith("+") else ""
    key, equals, _ = last.removeprefix("+").partition("=")
    values = keys_and_values()
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


def _runs() -> Iterator[str]:
    """Yield the folders of runs in ``runs``, at any depth except inside of other runs."""
    from axonlaunch.system.storage.run_files import CONFIG

    for parent, names, files in os.walk("runs"):
        if CONFIG in files:
            yield parent
            names.clear()
