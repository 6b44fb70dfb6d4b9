"""Compares a layout with plain torch in one process, from the same weights and samples.

The layout runs on the mock world or on real ranks. No files remain.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonlaunch.comm import RankFailedError, World
from axonlaunch.comm.checks.json_exchange import all_gather_json
from axonlaunch.comm.connection.rendezvous import local_place
from axonlaunch.config import RunConfig
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.system.node import host
from axonlaunch.system.processes.temporary_folders import temporary_folder
from axonlaunch.verification.comparison import layout_run
from axonlaunch.verification.comparison.comparison_config import (
    lowered_thresholds,
    with_smooth_updates,
)
from axonlaunch.verification.comparison.layout_run import RankReport
from axonlaunch.verification.comparison.verdict import decide_verdict
from axonlaunch.verification.decisions.random_draws import Draw
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import Difference
from axonlaunch.verification.references.plain_model import threads_for
from axonlaunch.verification.references.reference import NoReferenceError
from axonlaunch.verification.references.reference_runs import run_references
from axonlaunch.verification.references.reference_values import Reference, ReferenceStep
from axonlaunch.verification.result import ParityResult, failed_result

_SAVED = "reference.pt"


def on_mock(
    config: RunConfig,
    plan: ComparisonPlan,
    *,
    one_process: Callable[[RunConfig, ComparisonPlan], tuple[Reference, ...]] = run_references,
) -> ParityResult:
    """Verify a layout with ranks that are threads of this process.

    Args:
        config: Checked and resolved configuration.
        plan: Length and scope of the comparison.
        one_process: Computes the reference; callers can pass a cached one for several layouts of
            the same model.
    """
    import_plugins(config.plugins)
    config = with_smooth_updates(config)
    try:
        references = one_process(config, plan)
    except NoReferenceError as error:
        return failed_result(config, plan.steps, str(error))
    world = World.mock(
        num_ranks(config), timeout_s=config.launch.timeout_s, device=config.launch.device
    )

    def run(member: World) -> RankReport:
        return layout_run.compare(config, member, references[0], plan, folder=folder)

    try:
        with threads_for(config), temporary_folder() as folder:
            with lowered_thresholds(plan):
                results = world.run(run)
            return decide_verdict(config, plan, references, results)
    except RankFailedError as error:
        return failed_result(config, plan.steps, str(error))


def save_reference(config: RunConfig, plan: ComparisonPlan, folder: str) -> ParityResult | None:
    """Run the reference and save it for ``verify_on_rank``; return a verdict if it fails."""
    import_plugins(config.plugins)
    try:
        references = run_references(with_smooth_updates(config), plan)
    except NoReferenceError as error:
        return failed_result(config, plan.steps, str(error))
    torch.save([asdict(reference) for reference in references], Path(folder) / _SAVED)
    return None


def verify_on_rank(
    config: RunConfig, plan: ComparisonPlan, folder: str, rank: int
) -> ParityResult | None:
    """Verify a layout as one of its ranks; rank 0 returns the verdict, other ranks None.

    Args:
        config: Checked and resolved configuration.
        plan: Length and scope of the comparison.
        folder: Folder with the file of ``save_reference``, also used for the rendezvous.
        rank: Global rank of this process.
    """
    ranks = num_ranks(config)
    import_plugins(config.plugins)
    config = with_smooth_updates(config)
    threads = config.launch.threads
    torch.set_num_threads(host.threads(ranks=ranks) if threads == "auto" else threads)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    environment = local_place(rank, ranks)
    os.environ.update(environment.variables())  # models may read them, as in training
    with World.join(
        environment,
        backend=config.launch.backend,
        device=config.launch.device,
        timeout_s=config.launch.timeout_s,
        store=store,
        connects_at_once=config.strategy.pipeline.degree == 1,
    ) as world:
        first, *others = map(_read, torch.load(Path(folder) / _SAVED))
        with lowered_thresholds(plan):
            report = layout_run.compare(config, world, first, plan, folder=Path(folder))
        gathered = all_gather_json(asdict(report))
    if rank:
        return None
    reports = [
        RankReport(
            [Difference(**item) for item in fields["differences"]],
            [Draw(**item) for item in fields["draws"]],
        )
        for fields in gathered
    ]
    return decide_verdict(config, plan, (first, *others), reports)


def _read(saved: dict[str, Any]) -> Reference:
    return Reference(**{**saved, "steps": [ReferenceStep(**step) for step in saved["steps"]]})
