"""``axonlaunch init``: writes a small project that trains."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from axonlaunch.cli.configuration.config import write_schema
from axonlaunch.cli.shared.options import Json, print_json, refuse, words_of
from axonlaunch.cli.shared.output_files import writing

HELP = "Write a small project that trains. It has settings, a model, data and a test."
EXAMPLES = """Examples:

\b
  axonlaunch init mine
  axonlaunch init mine --from chat
  cd mine && axonlaunch train run.yaml
"""
_TEMPLATES = Path(__file__).parent / "projects"
_TITLES = {
    "custom": "A model, data and a loss of yours",
    "image": "A classifier of images",
    "documents": "A model of documents",
    "chat": "A model of chats",
}
_CONTENTS = {
    "run.yaml": "settings of the run, with comments",
    "project.py": "the model and the data, with types",
    "documents.jsonl": "training data, one document a row",
    "chats.jsonl": "training data, one chat a row",
    "test_project.py": "a test (`pip install pytest`) that compares the layout with one process",
    "axonlaunch-schema.json": "the keys of `run.yaml`, for editors",
}
_ROWS = 400


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to create, or an empty one.")
    ] = Path(),
    kind: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="KIND",
            help="chat, documents, image or custom.",
            autocompletion=words_of(*_TITLES),
        ),
    ] = "custom",
    as_json: Json = False,
) -> None:
    """Write a project; existing files are never changed."""
    from axonlaunch.config.problems.did_you_mean import unknown
    from axonlaunch.config.validation.json_schema import FILE_NAME

    if kind not in _TITLES:
        refuse(unknown("project", kind, _TITLES), option="--from", value=kind)
    files = dict(_files(kind))
    taken = [name for name in [*files, FILE_NAME] if (folder / name).exists()]
    if taken:
        reason = f"{', '.join(taken)} exist{'s' if len(taken) == 1 else ''} there already"
        refuse(f"{folder}: {reason}; give another folder")
    with writing("FOLDER", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x") as stream:
                stream.write(text)
        write_schema(folder)
    if as_json:
        print_json({"folder": str(folder), "files": [*files, FILE_NAME]})
        return
    for name in files:
        sys.stdout.write(f"{folder / name}\n")
    steps = ["axonlaunch train run.yaml"]
    if folder != Path():
        steps.insert(0, f"cd {shlex.quote(str(folder))}")
    if kind == "chat" and importlib.util.find_spec("transformers") is None:
        steps.insert(0, "pip install 'axonlaunch[hf]'")  # its tokenizer is trained on the chats
    sys.stdout.write(f"\nnext: {' && '.join(steps)}\n")


def _files(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each file of a project."""
    from axonlaunch.config.validation.json_schema import FILE_NAME, editor_line

    templates = {path.stem: path for path in sorted((_TEMPLATES / kind).glob("*.txt"))}
    texts = {name: path.read_text() for name, path in templates.items()}
    texts["run.yaml"] = f"{editor_line(FILE_NAME)}\n{texts['run.yaml']}"
    if kind == "chat":
        texts["chats.jsonl"] = _jsonl(
            {"prompt": f"What is {n} + {n % 7}?", "completion": f"{n + n % 7}."}
            for n in range(_ROWS)
        )
    elif kind == "documents":
        texts["documents.jsonl"] = _jsonl(
            {"text": f"{n} and {n + 1} are {2 * n + 1}. {n} times two is {2 * n}."}
            for n in range(_ROWS)
        )
    texts["test_project.py"] = (_TEMPLATES / "test_project.py.txt").read_text()
    texts["README.md"] = (
        (_TEMPLATES / "README.md.txt")
        .read_text()
        .format(
            title=_TITLES[kind],
            report=f"axonlaunch report runs/{_name_of_run(texts['run.yaml'])}",
            files="\n".join(
                f"| `{name}` | {text} |"
                for name, text in _CONTENTS.items()
                if name in texts or name == FILE_NAME
            ),
        )
    )
    yield from texts.items()


def _name_of_run(settings: str) -> str:
    lines = settings.splitlines()
    return next(line.split()[1] for line in lines if line.startswith("name:"))


def _jsonl(rows: Iterator[dict[str, str]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
