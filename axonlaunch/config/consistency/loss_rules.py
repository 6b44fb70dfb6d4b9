"""Rules of the loss: its terms, and the kernel that computes it together with the head."""

from __future__ import annotations

from collections.abc import Iterator

from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.config.schema import RunConfig


def loss_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield combinations of terms, and settings that ``train.loss_kernel`` does not support."""
    yield from _loss_terms(config)
    if config.train.loss_kernel is not None and (problem := _kernel_problem(config)):
        yield ConfigIssue("train.loss_kernel", f"{problem}, or null", config.train.loss_kernel)


def _kernel_problem(config: RunConfig) -> str:
    """Return why a kernel can't compute the head and the loss; empty if it can."""
    train, strategy = config.train, config.strategy
    if train.loss_chunk is not None:
        return "the kernel chooses its chunks itself; use train.loss_chunk=null"
    if strategy.tensor.degree > 1:
        return (
            f"the kernel needs the complete head, and strategy.tensor.degree="
            f"{strategy.tensor.degree} divides it; use 1, or train.loss_chunk, which bounds the "
            "memory of logits in every layout"
        )
    if strategy.pipeline.degree > 1 and SCHEDULES[strategy.pipeline.schedule].separate_weight_grad:
        return (
            "the kernel computes the gradients of inputs and weights together, and the schedule "
            f"{strategy.pipeline.schedule} separately; use strategy.pipeline.schedule=1f1b"
        )
    if PRECISIONS[train.precision].needs_loss_scale:
        return (
            "the kernel adds up gradients before they are multiplied by the loss scale, which may "
            f"exceed the range of {train.precision}; use train.precision=bf16"
        )
    if train.eaft:
        return "the kernel has no weights by entropy; use train.eaft=0"
    return ""


def _loss_terms(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield terms that would be added to a loss that weights targets."""
    train, keys = config.train, ["label_smoothing", "z_loss"]
    if train.dft:
        chosen, off = "train.dft=true", "train.dft=false"
        keys.append("eaft")
    elif train.eaft:
        chosen, off = f"train.eaft={train.eaft}", "train.eaft=0"
    else:
        return
    for key in keys:
        if value := getattr(train, key):
            message = f"{chosen} weights plain cross entropy; use 0, or {off}"
            yield ConfigIssue(f"train.{key}", message, value)
