"""Verifies or proves a layout from the parent, which has no torch; processes of its own do it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import cast

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.layout import num_ranks
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.system import forked_call
from axonlaunch.system.forked_process import ProcessDiedError, reason_of
from axonlaunch.system.forkserver import Starter
from axonlaunch.system.temporary_folders import temporary_folder
from axonlaunch.verification.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult, Proof, failed_result, layout_of

_log = logging.getLogger(__name__)
_COMPARING = "comparing the layout with one process"
_PROOF_S = 120.0
"""Seconds that a proof takes at most: one of 8 ranks takes up to 20 on two cores."""


def verify(
    context: ForkServerContext,
    config: RunConfig,
    *,
    steps: int,
    fp64: bool = False,
    dump: Path | None = None,
) -> ParityResult:
    """Check a configuration, run its layout and one process, compare.

    ``launch.backend=auto`` means the mock world here, which needs neither ports nor devices; what
    is compiled needs processes. Of GPUs that this leaves unused a note is made.

    Args:
        context: Starts the processes.
        config: As it was loaded, ``strategy.auto`` decided.
        steps: Optimizer steps.
        fp64: Whether the one process computes in float64.
        dump: Where both sides of the first steps are kept; None: nowhere.

    Raises:
        ConfigError: The configuration can't be run.
    """
    if dump is not None and config.train.compile:
        message = "train.compile=true: compiled blocks can't be recorded; use false, or no --dump"
        raise ConfigError([ConfigIssue("train.compile", message)])
    if isinstance(config.model, HuggingFaceConfig):
        # Any weights do, and those of the seed need no files.
        config = configuration.with_values(config, {"model.init": "random"})
    devices = 0
    if config.launch.backend == "auto":
        devices = forked_call.call(
            context,
            "axonlaunch.preflight.devices:accelerators",
            config,
            task="counting accelerators",
        )
        backend = "gloo" if config.train.compile else "mock"
        config = configuration.with_values(config, {"launch.backend": backend})
    config = forked_call.call(
        context, "axonlaunch.preflight.checks:resolve", config, task="checking the configuration"
    )
    plan = ComparisonPlan(steps=steps, beyond=True, fp64=fp64, asked=config)
    config = forked_call.call(
        context,
        "axonlaunch.verification.comparison_config:demanding",
        config,
        plan,
        task="preparing the comparison",
    )
    if config.launch.backend == "mock":
        verdict: ParityResult = forked_call.call(
            context, "axonlaunch.verification.compare:on_mock", config, plan, task=_COMPARING
        )
    else:
        verdict = _on_processes(context, config, plan)
    verdict = replace(verdict, notes=[*verdict.notes, *_notes(config, devices)])
    has_failed = verdict.verdict == "failed"
    if verdict.failure is not None or config.train.compile or not (has_failed or dump):
        return verdict
    locating = (config, plan, dump)
    first = forked_call.call(
        context,
        "axonlaunch.verification.locate:locate_difference",
        *locating,
        task="looking for the first tensor that differs",
    )
    return replace(verdict, first_difference=str(first)) if has_failed and first else verdict


def is_to_be_proved(config: RunConfig) -> bool:
    """Say whether a layout is compared with one process before its first step.

    Args:
        config: With ``launch.nproc`` resolved.
    """
    asked = config.train.prove
    if asked == "never" or num_ranks(config) == 1:
        return False
    return asked == "always" or isinstance(config.model, HuggingFaceConfig)


def prove_layout(context: Starter, config: RunConfig) -> Proof | None:
    """Compare a checked run's layout with one process, on a small model; None: nobody asks for it.

    Ctrl-C ends it, and leaves no process behind.

    Raises:
        ConfigError: The layout does not compute what one process does.
    """
    if not is_to_be_proved(config):
        return None
    call = forked_call.ForkedCall(
        context, "axonlaunch.verification.layout_proof:prove", (config,), task=_COMPARING
    )
    try:
        if not call.is_ready(within_s=_PROOF_S):
            reason = f"it takes more than {_PROOF_S:.0f} s here"
            return Proof(layout=layout_of(config), seconds=_PROOF_S, reason=reason)
        error = call.receive()
    finally:
        call.end()
    if isinstance(error, ConfigError):
        raise error
    if error is not None:  # of what proves, or of a model's own code: no reason against the run
        died = isinstance(error, ProcessDiedError)
        _log.warning("the proof failed", exc_info=None if died else error)
        return Proof(layout=layout_of(config), reason=reason_of(error))
    return cast("Proof", call.result)


def foresee_proof(context: Starter, config: RunConfig) -> Proof | None:
    """Return what ``prove`` would do, and do nothing; None where it would do nothing."""
    if not is_to_be_proved(config):
        return None
    proof = forked_call.call(
        context,
        "axonlaunch.verification.layout_proof:foresee",
        config,
        task="looking at what the proof would compare",
    )
    return cast("Proof", proof)


def _notes(config: RunConfig, devices: int) -> list[str]:
    """Say that ranks were on the CPU where nobody asked for that.

    Args:
        config: Resolved.
        devices: GPUs here, where the user has not chosen a backend.
    """
    if not devices or config.launch.device == "cuda":
        return []
    here = "a GPU" if devices == 1 else f"{devices} GPUs"
    ways = ["launch.device=cuda lets ranks share one"]
    if num_ranks(config) <= devices:
        ways.insert(0, "launch.backend=nccl gives each rank its own")
    return [f"both sides ran on the CPU, and this node has {here}: {', '.join(ways)}"]


def _on_processes(
    context: ForkServerContext, config: RunConfig, plan: ComparisonPlan
) -> ParityResult:
    with temporary_folder() as folder:
        run = "axonlaunch.verification.compare:"
        arguments = (config, plan, str(folder))
        reference = forked_call.call(
            context, f"{run}save_reference", *arguments, task="training the reference"
        )
        if reference is not None:  # there is none: it says why
            return cast("ParityResult", reference)
        ranks = [(*arguments, rank) for rank in range(num_ranks(config))]
        try:
            verdict, *_ = forked_call.call_together(
                context, f"{run}verify_on_rank", ranks, task=_COMPARING
            )
        except forked_call.CallsFailedError as error:
            for rank, failure in error.errors.items():
                _log.debug("rank %d failed", rank, exc_info=failure)
            return failed_result(config, plan.steps, _who(error.errors))
        return cast("ParityResult", verdict)


def _who(errors: Mapping[int, Exception]) -> str:
    """Name the rank that failed; of several, one that did not merely lose its connection."""
    rank = min(errors, key=lambda number: ("onnection" in str(errors[number]), number))
    return f"rank {rank} failed: {reason_of(errors[rank])}"
