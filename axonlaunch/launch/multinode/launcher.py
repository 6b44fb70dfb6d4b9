"""One of several nodes of a run, which starts its own ranks beside the others'.

What fails is started again where that may help, with the nodes that are left.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from multiprocessing.context import ForkServerContext
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.launch.local.launcher import attempt
from axonlaunch.launch.local.supervisor import was_interrupted
from axonlaunch.launch.multinode.membership import NodeMembership, unsaid
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import RunRecorder, finish_run, report_crash
from axonlaunch.planning.background_estimate import BackgroundEstimate


def train(
    config: RunConfig,
    problems: list[ConfigIssue],
    context: ForkServerContext,
    *,
    started: float,
    as_json: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Run this node's ranks beside those of the others, again where that may help.

    Args:
        config: With ``launch`` settled; checked, and resolved unless there are problems.
        problems: What this node can't run it for; reported to the others.
        context: Of the warm fork server.
        started: ``time.time()`` when the user's command began.
        as_json: Keep standard output free.

    Returns:
        The exit status and, on node 0, what was written to ``summary.json``.

    Raises:
        ConfigError: The nodes can't meet, or differ; no rank was started.
    """
    if missing := unsaid(config):
        raise ConfigError([*problems, *missing])
    console = RunConsole(stream=sys.stderr if as_json else sys.stdout)
    me = NodeMembership(config, problems, console)
    with ExitStack() as folder:
        record = RunRecorder(started, console)
        try:
            while True:
                config, meeting = me.rendezvous(folder)
                prediction = BackgroundEstimate(context, config)
                record.prediction = folder.enter_context(closing(prediction))
                outcome = attempt(
                    config, context, meeting, record, console, restarted=me.attempts > 0
                )
                if not me.should_restart(outcome):
                    break
                console.stop()
                if outcome.crash is None:
                    console.line("waiting for nodes")
                    continue
                if meeting.node_rank == 0:
                    report_crash(config, outcome.crash)
                console.line(
                    f"restart {me.restarts} of {config.launch.max_restarts}: waiting for nodes"
                )
        finally:
            console.stop()
        me.leave()
        if meeting.node_rank == 0:
            return finish_run(config, outcome, record, console, context=context)
    if outcome.crash is not None:
        report_crash(config, outcome.crash)
    if was_interrupted(outcome):
        return 130, None
    return (1 if outcome.crash is not None else 0), None
