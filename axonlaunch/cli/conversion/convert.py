"""``axonlaunch convert``: translates a configuration of another tool."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.configuration.config import write_schema
from axonlaunch.cli.shared.options import Json, escape_unprintable, print_json, words_of
from axonlaunch.cli.shared.output_files import writing

if TYPE_CHECKING:
    from axonlaunch.config.validation.other_tools.translation import Translation

HELP = "Translate another tool's file. axolotl, LLaMA-Factory, torchtune and trl are known."
EXAMPLES = """Examples:

\b
  axonlaunch convert lora-8b.yml
  axonlaunch convert sft.yaml --from trl --devices 8
  axonlaunch convert lora-8b.yml --output configs/experiment/lora_8b.yaml
"""


def command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Configuration of the other tool, in YAML.")
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="axolotl, llamafactory, llamafactory-v1, torchtune or trl; default: recognized by "
            "the keys.",
            autocompletion=words_of(
                "axolotl", "llamafactory", "llamafactory-v1", "torchtune", "trl"
            ),
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            "--devices",
            metavar="N",
            help="Number of devices of the original, which its batch size is multiplied by.",
        ),
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write to this file, experiment/NAME.yaml; default: standard output.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Translate a configuration; the status is 1 if something that changes training is missing."""
    from axonlaunch.cli.conversion.experiment_file import experiment_yaml
    from axonlaunch.config.validation.other_tools.translate import convert_file
    from axonlaunch.system.storage.files import replace_text

    _check_options(devices, output)
    translation = convert_file(file, tool=tool, devices=devices)
    text = experiment_yaml(translation, file.name)
    if output is not None:
        with writing("--output", output):
            output.parent.mkdir(parents=True, exist_ok=True)
            replace_text(output, with_schema(text))
            write_schema(output.parent.parent)
    if as_json:
        print_json(to_json(translation, text))
    else:
        if output is None:
            sys.stdout.write(text)
        for line in report_lines(translation):
            sys.stderr.write(f"{escape_unprintable(line)}\n")
        if output is not None:
            folder = output.parent.parent
            sys.stdout.write(f"axonlaunch train --config-dir {folder} experiment={output.stem}\n")
    return int(translation.changes_training)


def with_schema(text: str) -> str:
    """Insert the line by which editors find the schema, which is in the parent folder."""
    from axonlaunch.config.validation.json_schema import FILE_NAME, editor_line

    package, newline, rest = text.partition("\n")  # Hydra reads the first line
    return f"{package}{newline}{editor_line(f'../{FILE_NAME}')}\n{rest}"


def to_json(translation: Translation, text: str) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "from": translation.tool.name,
        "experiment": text,
        "expressed": translation.expressed,
        "not_needed": translation.not_needed,
        "remarks": [
            {"kind": each.kind, "key": each.key, "value": each.value, "text": each.text}
            for each in translation.remarks
        ],
    }


def report_lines(translation: Translation) -> list[str]:
    """Return a line for each key that was not translated one to one, and the numbers of keys.

    Keys that have the same text are in one line.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for remark in translation.remarks:
        groups.setdefault((remark.kind, remark.text), []).append(remark.setting)
    order = ("note", "unknown", "left out")
    lines = [
        f"{kind}: {', '.join(settings)}: {text}"
        for (kind, text), settings in sorted(
            groups.items(), key=lambda each: order.index(each[0][0])
        )
    ]
    counts = Counter(remark.kind for remark in translation.remarks)
    expressed = len(translation.expressed)
    numbers = [f"{expressed} keys translated", f"{len(translation.not_needed)} not needed"]
    numbers += [f"{counts['left out']} left out", f"{counts['unknown']} unknown"]
    return [*lines, f"{translation.tool.name}: {', '.join(numbers)}"]


def _check_options(devices: int, output: Path | None) -> None:
    """Check the options before the file is read.

    Raises:
        ConfigError: The number of devices is below 1, or the output can't be used.
    """
    from axonlaunch.config import ConfigError, ConfigIssue

    problems = []
    if devices < 1:
        problems.append(ConfigIssue("--devices", "must be 1 or more", devices))
    reason = ""
    if output is not None and output.suffix != ".yaml":
        reason = "must end in .yaml"
    elif output is not None and output.parent.name != "experiment":
        reason = f"must be in a folder named experiment; write experiment/{output.name}"
    elif output is not None and output.exists():
        reason = "already exists; give another name, or remove it"
    if reason:
        problems.append(ConfigIssue("--output", reason, str(output)))
    if problems:
        raise ConfigError(problems)
