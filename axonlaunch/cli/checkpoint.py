"""``axonlaunch checkpoint ls | check | diff | export | import``."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.command_help import Command, Subcommands
from axonlaunch.cli.shared.options import Json, Trust, print_json, refuse, show_help, words_of
from axonlaunch.system.storage.files import LARGEST_WEIGHTS_FILE
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from axonlaunch.checkpoint import Checkpoint
    from axonlaunch.checkpoint.loading.diff import TensorDifference
    from axonlaunch.config import RunConfig

HELP = "Inspect, verify, export and import checkpoints."
EXAMPLES = """Examples:

\b
  axonlaunch checkpoint ls runs/gpt-fsdp
  axonlaunch checkpoint check runs/gpt-fsdp
  axonlaunch checkpoint diff runs/a/checkpoints/step_100 \\
      runs/b/checkpoints/step_100
  axonlaunch checkpoint export runs/gpt-fsdp exported
  axonlaunch checkpoint export runs/gpt-fsdp --push ORG/NAME
  axonlaunch checkpoint import exported runs/imported
"""
MAX_SHOWN_TENSORS = 10
GB = 10**9
_NOT_FOR_TRANSFORMERS = (
    "note: transformers cannot load these weights. To train a model that it can load, use "
    "model=hf model.init=random 'model.config={model_type: llama, ...}'"
)


def _storage_path(text: str) -> Path:
    from axonlaunch.checkpoint.format.storage import storage_path

    return storage_path(text)


RunDir = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR",
        parser=_storage_path,
        help="Folder or fsspec URL of a run or of one of its checkpoints.",
    ),
]
checkpoint_app = typer.Typer(
    cls=Subcommands, help=HELP, epilog=EXAMPLES, rich_markup_mode=None, invoke_without_command=True
)


checkpoint_app.callback()(show_help)


@checkpoint_app.command(
    "ls", cls=Command, help="List a run's checkpoints: step, size, age, layout, loss."
)
def ls(run_dir: RunDir, as_json: Json = False) -> None:
    """List a run's checkpoints."""
    from axonlaunch.checkpoint import corrupt_checkpoints
    from axonlaunch.checkpoint.format import step_folders
    from axonlaunch.checkpoint.format.storage import reaching
    from axonlaunch.checkpoint.loading import fallback
    from axonlaunch.checkpoint.loading.given_path import require_folder

    require_folder(run_dir)
    with reaching(run_dir):
        checkpoints = _all(run_dir)
        sizes = [sum(f.bytes for f in step_folders.files(c).values()) for c in checkpoints]
        corrupt = {str(path): reason for path, reason in corrupt_checkpoints(run_dir).items()}
        aside = {str(path): reason for path, reason in fallback.put_aside_before(run_dir).items()}
    rows = [{**_to_json_dict(c), "bytes": size} for c, size in zip(checkpoints, sizes, strict=True)]
    if as_json:
        print_json({"checkpoints": rows, "corrupt": corrupt, "aside": aside})
        return
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from axonlaunch.system.text.formatting import ago, size

    console = console_on()
    if not rows and not corrupt and not aside:
        console.print(f"{run_dir} contains no checkpoint", markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("step", "size", "saved", "layout", "ranks", "loss", "evaluation"):
        table.add_column(name, justify="left" if name in ("layout", "saved") else "right")
    for row in rows:
        table.add_row(
            str(row["step"]),
            size(row["bytes"]),
            ago(time.time() - row["saved_at"]),
            Text(row["layout"]),
            str(row["world_size"]),
            *("" if row[k] is None else f"{row[k]:.4f}" for k in ("loss", "eval_loss")),
        )
    console.print(table)
    for path, reason in corrupt.items():
        console.print(f"[red]corrupt[/red]  {escape(f'{path} {reason}')}", soft_wrap=True)
    for path, reason in aside.items():
        console.print(f"[yellow]moved aside[/yellow]  {escape(f'{path} {reason}')}", soft_wrap=True)


@checkpoint_app.command(
    "check", cls=Command, help="Verify all checksums, and that no parameter is missing."
)
def check_files(run_dir: RunDir, trust: Trust = False, as_json: Json = False) -> None:
    """Verify all checksums, and that no parameter is missing."""
    from axonlaunch.checkpoint import corrupt_checkpoints
    from axonlaunch.checkpoint.format.storage import reaching
    from axonlaunch.checkpoint.loading import diff
    from axonlaunch.checkpoint.loading.given_path import require_folder

    require_folder(run_dir)
    with spinner("reading"), reaching(run_dir):
        problems = {str(path): [reason] for path, reason in corrupt_checkpoints(run_dir).items()}
        for checkpoint in _all(run_dir):
            problems[str(checkpoint.path)] = diff.faults(checkpoint, _config(checkpoint, trust))
    if not problems:
        refuse(f"{run_dir}: contains no checkpoint")
    passed = not any(problems.values())
    if as_json:
        print_json({"passed": passed, "checkpoints": problems})
    else:
        from rich.markup import escape

        console = console_on()
        for path, faults in problems.items():
            verdict = "[red]corrupt[/red]" if faults else "[green]intact[/green]"
            console.print(f"{verdict}  {escape(path)}", soft_wrap=True)
            for line in faults[:MAX_SHOWN_TENSORS]:
                console.print(f"  {line}", markup=False, soft_wrap=True)
            if len(faults) > MAX_SHOWN_TENSORS:
                console.print(f"  {len(faults) - MAX_SHOWN_TENSORS} more; use --json to list all")
    raise typer.Exit(0 if passed else 1)


@checkpoint_app.command(
    "diff", cls=Command, help="Compare two checkpoints; exit status 1 if any tensor differs."
)
def diff(
    first: Annotated[
        Path, typer.Argument(metavar="A", parser=_storage_path, help="A run or a checkpoint.")
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", parser=_storage_path, help="Another run or checkpoint."),
    ],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints.

    Raises:
        typer.Exit: Always; status 1 if tensors differ, as for ``diff``, otherwise 0.
    """
    from axonlaunch.checkpoint.format.storage import reaching
    from axonlaunch.checkpoint.loading import diff
    from axonlaunch.checkpoint.loading.given_path import require_checkpoint

    with spinner("comparing"), reaching(first), reaching(second):
        differences = diff.compare_checkpoints(
            require_checkpoint(first), require_checkpoint(second)
        )
    if as_json:
        print_json(
            {
                "equal": not differences,
                "differences": [asdict(difference) for difference in differences],
            }
        )
    elif differences:
        _show_differences(differences)
    else:
        typer.echo("bitwise equal")
    raise typer.Exit(1 if differences else 0)


def _show_differences(differences: list[TensorDifference]) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = console_on()
    console.print(
        "1 tensor differs" if len(differences) == 1 else f"{len(differences)} tensors differ"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tensor", "largest difference", "relative"):
        table.add_column(name, justify="left" if name == "tensor" else "right", overflow="fold")
    for difference in differences[: 2 * MAX_SHOWN_TENSORS]:
        largest, relative = difference.largest, difference.relative
        table.add_row(
            escape(difference.name),
            escape(difference.reason) if largest is None else f"{largest:.3g}",
            "" if relative is None else f"{relative:.3g}",
        )
    console.print(table)
    if len(differences) > 2 * MAX_SHOWN_TENSORS:
        more = len(differences) - 2 * MAX_SHOWN_TENSORS
        console.print(f"{more} more; use --json to list all")


def _dtypes() -> list[str]:
    """Return the names of number formats, for completion."""
    from axonlaunch.config.precision import NUMBER_FORMATS

    return [*NUMBER_FORMATS]


@checkpoint_app.command(
    "export",
    cls=Command,
    help="Export weights as safetensors files. With model=hf, transformers can load the folder.",
)
def export_run(
    run_dir: RunDir,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="Folder to create.", show_default=False),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="File format; only safetensors.",
            autocompletion=words_of("safetensors"),
        ),
    ] = "safetensors",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="fp32, bf16 or fp16; default: as saved.",
            show_default=False,
            autocompletion=_dtypes,
        ),
    ] = None,
    file_gb: Annotated[
        float,
        typer.Option(
            "--file-gb", metavar="GB", min=0.001, max=1e6, help="Maximum size of a file in GB."
        ),
    ] = LARGEST_WEIGHTS_FILE / GB,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Merge the adapter into the model. Otherwise only the adapter is exported, in "
            "PEFT's format.",
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="ORG/NAME",
            help="Upload to this model repository of the Hugging Face Hub, with a model card.",
            show_default=False,
        ),
    ] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Create the repository as a private one. Otherwise your account's settings on "
            "the Hub decide, which is public by default.",
        ),
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Export weights as safetensors files, and upload them to the Hugging Face Hub."""
    checkpoint = _exportable(run_dir, out, push, private=private, form=form, dtype=dtype)
    config = _config(checkpoint, trust)
    with ExitStack() as stack:
        show = stack.enter_context(spinner("writing"))
        from axonlaunch.checkpoint.exchange import hub_push, weights

        folder = out
        if folder is None:
            parent = stack.enter_context(TemporaryDirectory(prefix="axonlaunch-"))
            folder = Path(parent, "exported")
        written = weights.export_weights(
            checkpoint,
            config,
            folder,
            dtype=dtype,
            file_bytes=int(file_gb * GB),
            merge=merge,
        )
        pushed = None
        if push is not None:
            show(f"uploading to {push}")
            pushed = hub_push.push_export(
                folder,
                checkpoint,
                config,
                push,
                private=private,
                is_merged=merge,
                key="--push",
            )
    if as_json:
        kept = None if out is None else str(out)
        content = {"checkpoint": str(checkpoint.path), "folder": kept, "files": written}
        print_json({**content, "pushed": pushed})
        return
    if out is not None:
        _print_files(out, written, config, is_adapter=not merge)
    if pushed is not None:
        typer.echo(f"uploaded to {pushed}")
    if config.model.name in ("gpt", "llama"):
        typer.echo(_NOT_FOR_TRANSFORMERS, err=True)


def _print_files(out: Path, written: list[str], config: RunConfig, *, is_adapter: bool) -> None:
    """Print the paths of exported files, and how to load them."""
    from axonlaunch.checkpoint.exchange.weights import how_to_load

    for name in written:
        typer.echo(f"{out / name}")
    typer.echo(f"to load: {how_to_load(out, config, is_adapter=is_adapter)}")


def _exportable(
    run_dir: Path,
    out: Path | None,
    push: str | None,
    *,
    private: bool,
    form: str,
    dtype: str | None,
) -> Checkpoint:
    """Return the checkpoint to export, if all options of ``export`` are valid.

    Raises:
        ConfigError: There is no checkpoint, or options are missing or invalid.
    """
    from axonlaunch.checkpoint.loading.given_path import require_checkpoint
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.precision import NUMBER_FORMATS
    from axonlaunch.config.problems.errors import gathering, one_of

    problems = []
    if out is None and push is None:
        message = "is missing; give a folder to create, or --push ORG/NAME"
        problems.append(ConfigIssue("OUT", message))
    if private and push is None:
        problems.append(ConfigIssue("--private", "nothing is uploaded; add --push ORG/NAME"))
    if form != "safetensors":
        problems.append(ConfigIssue("--format", "is not supported; use safetensors", form))
    if dtype is not None and dtype not in NUMBER_FORMATS:
        message = f"is not supported; use {one_of([*NUMBER_FORMATS])}"
        problems.append(ConfigIssue("--dtype", message, dtype))
    if push is not None:
        from axonlaunch.checkpoint.exchange.hub_push import push_problems

        problems += push_problems(push, key="--push")
    with gathering(problems):
        checkpoint = require_checkpoint(run_dir)
    if problems:
        raise ConfigError(problems)
    return checkpoint


@checkpoint_app.command(
    "import", cls=Command, help="Create a run at step 0 from exported weights of a text model."
)
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with config.json and *.safetensors.")
    ],
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run to create.")
    ],
    as_json: Json = False,
) -> None:
    """Create a run from exported weights."""
    from axonlaunch import config as configuration
    from axonlaunch.checkpoint.loading.given_path import require_folder

    require_folder(folder)
    with spinner("reading"):
        from axonlaunch.checkpoint.exchange import weights

        written = weights.import_weights(folder, run_dir, configuration.load(["strategy=single"]))
    if as_json:
        print_json({"run_dir": str(run_dir), "checkpoint": str(written)})
        return
    typer.echo(f"{written}\ntrain from it with model.weights={run_dir}")


def _to_json_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**asdict(checkpoint), "path": str(checkpoint.path)}


def _all(path: Path) -> list[Checkpoint]:
    """Return the checkpoint at a path, or all checkpoints of the run at a path."""
    from axonlaunch.checkpoint import list_checkpoints
    from axonlaunch.checkpoint.format import step_folders

    checkpoint = step_folders.read_checkpoint(step_folders.follow_link(path))
    return [checkpoint] if checkpoint else list_checkpoints(path)


def _config(checkpoint: Checkpoint, trusted: bool) -> RunConfig:
    from axonlaunch.config import read_frozen

    return read_frozen(checkpoint.path.parent.parent, trusted=trusted)
