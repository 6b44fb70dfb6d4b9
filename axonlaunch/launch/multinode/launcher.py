"""Launches this node's ranks of a run on several nodes.

A failed attempt is restarted with the remaining nodes if a restart can help.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing, suppress
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.problems.errors import gathering
from axonlaunch.launch.failures.outcome import Outcome, was_interrupted
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.local.launcher import run_ranks
from axonlaunch.launch.multinode import token
from axonlaunch.launch.multinode.membership import NodeMembership
from axonlaunch.launch.multinode.node_settings import missing_settings
from axonlaunch.launch.multinode.run_end import finished_without_node_0
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import RunRecorder, finish_run, report_crash
from axonlaunch.launch.run_folder.open_folder import check_run_dir
from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.system.processes import forked_call
from axonlaunch.verification.proofs.runner import prove_layout


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Check the configuration in a dry run; otherwise return it unchanged.

    ``launch`` runs the checks itself, because it reports problems to the other nodes.

    Raises:
        ConfigError: This node can't run the configuration (only in a dry run).
    """
    if not options.dry_run:
        return config
    issues: list[ConfigIssue] = []
    with gathering(issues):
        config = _resolve(config, options)
    issues += missing_settings(config)
    with gathering(issues):
        if token.read_token(config.launch) is None:
            token.missing_token(config.launch, address="")
    with gathering(issues):
        if config.launch.node_rank == 0:  # the run folder is that of node 0
            check_run_dir(config)
    if issues:
        raise ConfigError(issues)
    return config


def _resolve(config: RunConfig, options: LaunchOptions) -> RunConfig:
    resolved: RunConfig = forked_call.call(
        options.fork_server,
        "axonlaunch.preflight.checks:resolve",
        config,
        task="checking the configuration",
    )
    return resolved


def _fetch(config: RunConfig, options: LaunchOptions) -> None:
    """Download the data that node 0 has chosen, if this node has not resolved the same commits.

    If that fails, so do the ranks, which report it to the other nodes.
    """
    with suppress(ConfigError):
        forked_call.call(
            options.fork_server,
            "axonlaunch.preflight.checks:fetch_model_and_data",
            config,
            task="downloading the data",
        )


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Run this node's ranks together with those of other nodes, with restarts if they can help.

    Args:
        config: Configuration with the environment's ``launch`` values.
        options: Options of the launch.

    Returns:
        The exit status and, on node 0, the content of ``summary.json``; that of an earlier launch
        if the run was already finished.

    Raises:
        ConfigError: The nodes can't meet or have different configurations. No rank was started.
    """
    context = options.fork_server
    problems: list[ConfigIssue] = []
    with gathering(problems):  # problems are reported to the other nodes
        config = _resolve(config, options)
    if missing := missing_settings(config):
        raise ConfigError([*problems, *missing])
    console = RunConsole(stream=sys.stderr if options.as_json else sys.stdout)
    if not problems and (finished := finished_without_node_0(config)) is not None:
        console.log(finished)
        return 0, None
    proof = None
    if not problems and config.launch.node_rank == 0:
        with gathering(problems):
            proof = prove_layout(context, config)
        if proof is not None:
            console.line(str(proof))
    me = NodeMembership(
        config,
        problems,
        console,
        composed=options.composed,
        launched_by=options.identity.name,
    )
    with ExitStack() as folder:
        record = RunRecorder(options.started, console, proof=proof)
        outcome: Outcome | None = None
        leads = False
        try:
            while True:
                attempt = me.rendezvous(folder)
                if attempt is None:
                    if outcome is not None and leads:
                        break  # too few nodes came for another attempt
                    me.leave()
                    return me.status, me.summary
                config, rendezvous = attempt
                leads = rendezvous.node_rank == 0
                if not leads:
                    _fetch(config, options)
                prediction = BackgroundEstimate(context, config)
                record.prediction = folder.enter_context(closing(prediction))
                outcome = run_ranks(
                    config, context, rendezvous, record, console, restarted=me.attempts > 0
                )
                if not me.should_restart(outcome):
                    break
                console.stop()
                if outcome.crash is None:
                    console.line("waiting for nodes")
                    continue
                if leads:
                    report_crash(config, outcome.crash)
                console.line(
                    f"restart {me.restarts} of {config.launch.max_restarts}: waiting for nodes"
                )
        finally:
            console.stop()
        me.leave(outcome)
        if leads:
            status, summary = finish_run(config, outcome, record, console, context=context)
            return me.exit_status(outcome, status), summary
    if outcome.crash is not None:
        report_crash(config, outcome.crash)
    status = 130 if was_interrupted(outcome) else int(outcome.crash is not None)
    return me.exit_status(outcome, status), None
