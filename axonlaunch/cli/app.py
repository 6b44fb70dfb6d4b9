"""The Typer application: a command a file, and what all of them do with a user's mistake."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli import (
    checkpoint,
    compare,
    config,
    data,
    diff,
    doctor,
    estimate,
    inspect,
    ls,
    plan,
    profile,
    report,
    runs,
    sample,
    schedule,
    train,
    verify,
    watch,
)
from axonlaunch.cli import (
    help as help_pages,
)
from axonlaunch.cli.options import print_problems
from axonlaunch.system import streams

if TYPE_CHECKING:
    from axonlaunch.config import ConfigIssue

app = typer.Typer(
    name="axonlaunch",
    help="Train PyTorch models on any layout of devices, from one YAML.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, module in {
    "train": train,
    "estimate": estimate,
    "plan": plan,
    "profile": profile,
    "sample": sample,
    "config": config,
    "schedule": schedule,
    "verify": verify,
    "inspect": inspect,
    "ls": ls,
    "runs": runs,
    "report": report,
    "watch": watch,
    "compare": compare,
    "diff": diff,
    "doctor": doctor,
    "help": help_pages,
}.items():
    app.command(name, help=module.HELP, epilog=module.EXAMPLES)(module.command)
app.add_typer(checkpoint.checkpoint_app, name="checkpoint")
app.add_typer(data.data_app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"axonlaunch {version('axonlaunch')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks, also of mistakes."),
    ] = False,
) -> None:
    del version
    if debug:
        import logging

        logging.basicConfig(format="debug: %(name)s: %(message)s")
        logging.getLogger("axonlaunch").setLevel(logging.DEBUG)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_command() -> None:
    """Run the application; what a user got wrong is one line a problem and exit status 2."""
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output is gone; nothing more can be said to them.
        streams.silence(sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        problems = _problems(error)
        if problems is None and (refusal := _refusal(error)):
            sys.stderr.write(f"error: {refusal}\n")  # standard output may be what is full
            sys.exit(1)
        if problems is None:
            raise
        _show_tracebacks(error, problems)
        print_problems(problems, as_json="--json" in sys.argv)
        sys.exit(2)
    sys.exit(status or 0)


def _show_tracebacks(error: Exception, problems: Sequence[ConfigIssue]) -> None:
    """Print where mistakes were found and where a user's code failed, under ``--debug``."""
    import logging

    logger = logging.getLogger(__name__)
    logger.debug("what led to the errors below", exc_info=error)
    for problem in problems:
        if problem.traceback:
            logger.debug("%s: the code that failed\n%s", problem.key, problem.traceback)


def _refusal(error: Exception) -> str:
    """Return what this node refused, and what to do; empty for a bug of ours."""
    from axonlaunch.launch.failures.report import cause_of, plain_error
    from axonlaunch.system.disk import shortage
    from axonlaunch.system.forked_call import CallsFailedError
    from axonlaunch.system.forked_process import ProcessDiedError
    from axonlaunch.system.forkserver import ForkServerError

    errors = error.errors.values() if isinstance(error, CallsFailedError) else [error]
    for failure in errors:
        if isinstance(failure, ForkServerError | ProcessDiedError):
            return str(failure)
    if isinstance(error, MemoryError):
        return (
            f"there was not enough memory{f': {error}' if str(error) else ''}; free some, allow "
            "more (ulimit -v), or use less data or a smaller model"
        )
    if not isinstance(error, OSError):
        return ""
    cause, remedy = cause_of(error), ""
    if cause == "disk":
        advice = shortage(Path(error.filename or "."))[1]
        remedy = f"{advice}, also in TMPDIR and where standard output goes"
    elif cause == "files":
        remedy = "allow more with ulimit -n, or use fewer ranks"
    return f"{plain_error(error)}; {remedy}" if remedy else ""


def _problems(error: Exception) -> list[ConfigIssue] | None:
    """Return a user's mistakes; None for a bug of ours."""
    from axonlaunch.checkpoint import CorruptCheckpointError
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.system.isolated import IsolatedCallError

    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, IsolatedCallError):
        return [ConfigIssue("tokenizer.path", str(error))]
    if isinstance(error, CorruptCheckpointError):
        return [ConfigIssue("", str(error))]
    # Typer's usage errors: some versions raise click's classes, some a copy of them.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    message = " ".join(format_message().split())
    option = getattr(error, "option_name", None)
    if option and not getattr(error, "possibilities", None):
        message += "; options are in --help, and settings are written key=value, without dashes"
    return [ConfigIssue("", message)]
