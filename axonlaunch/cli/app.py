"""The Typer application with all commands, and the handling of errors that they share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli import checkpoint
from axonlaunch.cli.command_help import Command, CommandGroups
from axonlaunch.cli.configuration import (
    completion,
    config,
    data,
    doctor,
    help as help_pages,
    init,
    inspect,
    ls,
)
from axonlaunch.cli.conversion import convert
from axonlaunch.cli.jobs import jobs, logs, resume, stop
from axonlaunch.cli.planning import estimate, plan, schedule, verify
from axonlaunch.cli.reports import compare, diff, report, runs
from axonlaunch.cli.shared.options import print_problems
from axonlaunch.cli.training import profile, sample, train, watch
from axonlaunch.system.text import streams

if TYPE_CHECKING:
    from axonlaunch.config import ConfigIssue

app = typer.Typer(
    cls=CommandGroups,
    name="axonlaunch",
    help="Train PyTorch models on any layout of devices, from one YAML.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMAND_GROUPS: dict[str, dict[str, Any]] = {
    "Start here": {"init": init, "train": train, "help": help_pages, "doctor": doctor},
    "Configuration and data": {
        "config": config,
        "ls": ls,
        "convert": convert,
        "inspect": inspect,
        "data": data.data_app,
        "completion": completion,
    },
    "Before a run": {
        "estimate": estimate,
        "plan": plan,
        "verify": verify,
        "schedule": schedule,
    },
    "Runs": {
        "runs": runs,
        "watch": watch,
        "report": report,
        "compare": compare,
        "diff": diff,
        "profile": profile,
    },
    "Jobs": {"jobs": jobs, "logs": logs, "stop": stop, "resume": resume},
    "Results": {"sample": sample, "checkpoint": checkpoint.checkpoint_app},
}
"""Commands by the groups in which ``--help`` lists them."""
for title, commands in _COMMAND_GROUPS.items():
    for name, module in commands.items():
        if isinstance(module, typer.Typer):
            app.add_typer(module, name=name, rich_help_panel=title)
        else:
            app.command(
                name,
                cls=Command,
                help=module.HELP,
                epilog=module.EXAMPLES,
                rich_help_panel=title,
            )(module.command)


def _print_version(is_set: bool) -> None:
    if is_set:
        from importlib.metadata import version

        typer.echo(f"axonlaunch {version('axonlaunch')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of every error."),
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
    """Run the application. Print one line for each user error and exit with status 2 or 75."""
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of standard output has closed it.
        streams.silence(sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        problems = _problems(error)
        if problems is None and (message := _system_error_message(error)):
            sys.stderr.write(f"error: {message}\n")  # standard output may be on the full disk
            sys.exit(1)
        if problems is None:
            raise
        _show_tracebacks(error, problems)
        print_problems(problems, as_json="--json" in sys.argv)
        from axonlaunch.config.problems.errors import exit_status

        sys.exit(exit_status(problems))
    sys.exit(status or 0)


def _show_tracebacks(error: Exception, problems: Sequence[ConfigIssue]) -> None:
    """Print the error's traceback and the tracebacks of failed user code, for ``--debug``."""
    import logging

    logger = logging.getLogger(__name__)
    logger.debug("traceback of the errors below", exc_info=error)
    for problem in problems:
        if problem.traceback:
            logger.debug(
                "%s: traceback of the code that failed\n%s", problem.key, problem.traceback
            )


def _system_error_message(error: Exception) -> str:
    """Return the cause and remedy of an error of this node; empty for any other error."""
    from axonlaunch.launch.failures.report import cause_of, plain_error
    from axonlaunch.system.processes.forked_call import CallsFailedError
    from axonlaunch.system.processes.forked_process import ProcessDiedError
    from axonlaunch.system.processes.forkserver import ForkServerError
    from axonlaunch.system.storage.disk import shortage

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
    """Return the user errors in an exception; None for a bug in this package."""
    from axonlaunch.cli.shared.usage_errors import usage_problem
    from axonlaunch.launch.failures.user_errors import user_problems

    if (problems := user_problems(error)) is not None:
        return problems
    problem = usage_problem(error, sys.argv[1:])
    return None if problem is None else [problem]
