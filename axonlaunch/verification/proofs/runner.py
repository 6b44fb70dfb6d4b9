"""Verifies or proves a layout in child processes. The parent process imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import cast

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.config.consistency.run_precision import with_precision
from axonlaunch.models.source_of import source_of
from axonlaunch.system.processes import forked_call
from axonlaunch.system.processes.forked_process import ProcessDiedError, reason_of
from axonlaunch.system.processes.forkserver import Starter
from axonlaunch.system.processes.temporary_folders import temporary_folder
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult, Proof, failed_result, layout_of

_log = logging.getLogger(__name__)
_COMPARING = "comparing the layout with one process"
_PROOF_S = 120.0
"""Time limit of a proof in seconds. A proof with 8 ranks takes up to 20 s on two cores."""


def verify(
    context: ForkServerContext,
    config: RunConfig,
    *,
    steps: int,
    fp64: bool = False,
    dump: Path | None = None,
) -> ParityResult:
    """Check a configuration, run it in its layout and in one process, and compare.

    ``launch.backend=auto`` selects the mock world, which needs neither ports nor devices, or gloo
    if the model is compiled. Unused GPUs are mentioned in a note of the result.

    Args:
        context: Context that starts the processes.
        config: Loaded configuration, with ``strategy.auto`` resolved.
        steps: Number of optimizer steps.
        fp64: Whether the reference computes in float64.
        dump: Folder for the tensors of the first two steps; None writes nothing.

    Raises:
        ConfigError: The configuration cannot be run.
    """
    if dump is not None and config.train.compile:
        message = "train.compile=true: compiled blocks cannot be recorded; use false or omit --dump"
        raise ConfigError([ConfigIssue("train.compile", message)])
    # Any weights serve the comparison, and random ones need no files.
    config = configuration.with_values(config, source_of(config).random_weights())
    config, devices = _with_backend(context, config)
    config = forked_call.call(
        context, "axonlaunch.preflight.checks:resolve", config, task="checking the configuration"
    )
    plan = ComparisonPlan(steps=steps, beyond=True, fp64=fp64, original=config)
    config = forked_call.call(
        context,
        "axonlaunch.verification.comparison.comparison_config:harder_config",
        config,
        plan,
        task="preparing the comparison",
    )
    if config.launch.backend == "mock":
        verdict: ParityResult = forked_call.call(
            context,
            "axonlaunch.verification.comparison.compare:on_mock",
            config,
            plan,
            task=_COMPARING,
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
        "axonlaunch.verification.locating.locate:locate_difference",
        *locating,
        task="looking for the first tensor that differs",
    )
    return replace(verdict, first_difference=str(first)) if has_failed and first else verdict


def _with_backend(context: ForkServerContext, config: RunConfig) -> tuple[RunConfig, int]:
    """Replace ``launch.backend=auto``, and return the number of unused GPUs too."""
    if config.launch.backend != "auto":
        return config, 0
    devices: int = forked_call.call(
        context,
        "axonlaunch.preflight.devices:accelerators",
        config,
        task="counting accelerators",
    )
    config = with_precision(config, has_bf16=devices > 0)  # that of a run on this node
    backend = "gloo" if config.train.compile else "mock"
    return configuration.with_values(config, {"launch.backend": backend}), devices


def is_to_be_proved(config: RunConfig) -> bool:
    """Return whether a layout is compared with one process before its first step.

    Args:
        config: Configuration with ``launch.nproc`` resolved.
    """
    prove = config.train.prove
    if prove == "never" or num_ranks(config) == 1:
        return False
    return prove == "always" or source_of(config).code == "library"


def prove_layout(context: Starter, config: RunConfig) -> Proof | None:
    """Compare a checked run's layout with one process on a small model; None if not required.

    Ctrl-C ends the comparison and its process.

    Raises:
        ConfigError: The results of the layout and of one process differ.
    """
    if not is_to_be_proved(config):
        return None
    call = forked_call.ForkedCall(
        context, "axonlaunch.verification.proofs.layout_proof:prove", (config,), task=_COMPARING
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
    if error is not None:  # an error of the proof or of the model's code does not stop the run
        died = isinstance(error, ProcessDiedError)
        _log.warning("the proof failed", exc_info=None if died else error)
        return Proof(layout=layout_of(config), reason=reason_of(error))
    return cast("Proof", call.result)


def preview_proof(context: Starter, config: RunConfig) -> Proof | None:
    """Predict the outcome of ``prove_layout`` without running it; None if it is not required."""
    if not is_to_be_proved(config):
        return None
    proof = forked_call.call(
        context,
        "axonlaunch.verification.proofs.layout_proof:preview",
        config,
        task="preparing the proof",
    )
    return cast("Proof", proof)


def _notes(config: RunConfig, devices: int) -> list[str]:
    """Return a note about unused GPUs if the backend was selected automatically.

    Args:
        config: Resolved configuration.
        devices: Number of GPUs of this node; 0 if the user selected a backend.
    """
    if not devices or config.launch.device == "cuda":
        return []
    gpus = "a GPU" if devices == 1 else f"{devices} GPUs"
    options = ["launch.device=cuda lets ranks share one"]
    if num_ranks(config) <= devices:
        options.insert(0, "launch.backend=nccl gives each rank its own")
    return [f"both sides ran on the CPU, and this node has {gpus}: {', '.join(options)}"]


def _on_processes(
    context: ForkServerContext, config: RunConfig, plan: ComparisonPlan
) -> ParityResult:
    with temporary_folder() as folder:
        module = "axonlaunch.verification.comparison.compare"
        arguments = (config, plan, str(folder))
        failed_reference = forked_call.call(
            context, f"{module}:save_reference", *arguments, task="training the reference"
        )
        if failed_reference is not None:
            return cast("ParityResult", failed_reference)
        ranks = [(*arguments, rank) for rank in range(num_ranks(config))]
        try:
            verdict, *_ = forked_call.call_together(
                context, f"{module}:verify_on_rank", ranks, task=_COMPARING
            )
        except forked_call.CallsFailedError as error:
            for rank, failure in error.errors.items():
                _log.debug("rank %d failed", rank, exc_info=failure)
            return failed_result(config, plan.steps, _failed_rank(error.errors))
        return cast("ParityResult", verdict)


def _failed_rank(errors: Mapping[int, Exception]) -> str:
    """Name a rank that failed, preferably one that did not only lose its connection."""
    rank = min(errors, key=lambda number: ("onnection" in str(errors[number]), number))
    return f"rank {rank} failed: {reason_of(errors[rank])}"
