"""What batches of any structure, and a loss of one's own, ask of a run, before there is a rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.samples import CollatedSamples, Samples, taken_names
from axonlaunch.data.user_datasets import StreamedSamples

_TRIED = 2
"""Samples of the batch that is tried: of one any batch can be made."""
_DIVIDED = {"tensor": "layers", "pipeline": "blocks", "context": "sequences"}
_ANYTHING = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def own_data_problems(
    config: RunConfig, model: nn.Module | None, dataset: Dataset | None
) -> Iterator[ConfigIssue]:
    """Yield why a run can't take its loss, or batches of the structure that its data gives.

    Args:
        config: The run's.
        model: On the meta device; None: it could not be built.
        dataset: None: it could not be made.
    """
    structured = dataset is not None and dataset.kind == "structured"
    name = config.data.name
    if dataset is not None and needs_own_loss(dataset) and config.train.loss is None:
        gives = "batches of which the model's loss does not know the targets"
        gives = (
            gives if structured else "targets that are floats, and the model's loss takes classes"
        )
        message = f"data={name} gives {gives}; name a loss of yours, registered by register_loss"
        yield ConfigIssue("train.loss", message, None)
    if structured or config.train.loss is not None:
        yield from _refuse_division(config, structured=structured)
    if structured and model is not None:
        assert dataset is not None
        try:
            batch = first_batch(dataset, size=_TRIED)
        except ConfigError as error:
            yield from error.problems
            return
        yield from _forward_problems(config, model, batch)


def needs_own_loss(dataset: Dataset) -> bool:
    """Say whether no loss of a model knows what its targets mean."""
    return dataset.kind == "structured" or dataset.info.float_targets is not None


def first_batch(dataset: Dataset, *, size: int) -> CollatedSamples:
    """Return the first micro-batch of samples of any structure.

    Raises:
        ConfigError: There is no sample, or no batch can be made of it.
    """
    try:
        samples = _first(dataset, size)
    except Exception as error:  # somebody's own code may fail in any way
        issue = ConfigIssue.of_failure("data", "reading its first sample", error)
        raise ConfigError([issue]) from error
    if not len(samples):
        raise ConfigError([ConfigIssue("data", "the dataset is empty: it gives no sample")])
    try:
        [batch] = samples.micro_batches(size)
    except Exception as error:
        then = "give it a collate function that takes a list of them"
        issue = ConfigIssue.of_failure("data", "making a batch of its samples", error, then=then)
        raise ConfigError([issue]) from error
    return batch


def _first(dataset: Dataset, size: int) -> Samples:
    if isinstance(dataset, StreamedSamples):
        return Samples(list(islice(dataset.read(), size)), dataset.collate)
    samples = dataset.samples(np.arange(min(size, dataset.num_samples)), split="train")
    assert isinstance(samples, Samples)
    return samples


def _refuse_division(config: RunConfig, *, structured: bool) -> Iterator[ConfigIssue]:
    """Refuse layouts that cut a model, or its batch, in a way that nobody said how to."""
    whose = f"data={config.data.name} gives batches of any structure"
    if not structured:
        whose = f"train.loss={config.train.loss} sees the whole batch and the whole outputs"
    for axis, what in _DIVIDED.items():
        degree = getattr(config.strategy, axis).degree
        if degree > 1:
            message = f"{whose}, and this divides {what}, where no rank has them; use 1, and ddp, "
            yield ConfigIssue(f"strategy.{axis}.degree", f"{message}zero1 or fsdp", degree)
    if config.train.loss_chunk is not None:
        message = f"{whose}, which can't be computed in chunks; use null"
        yield ConfigIssue("train.loss_chunk", message, config.train.loss_chunk)


def _forward_problems(
    config: RunConfig, model: nn.Module, batch: CollatedSamples
) -> Iterator[ConfigIssue]:
    """Hold the names of a batch against those of the forward."""
    if not isinstance(batch.whole, Mapping):
        return
    names = ", ".join(map(str, batch.whole))
    parameters = inspect.signature(model.forward).parameters
    taken = taken_names(model.forward, batch.whole)
    wanted = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _ANYTHING
    ]
    if not taken:
        message = f"its forward takes {', '.join(parameters) or 'nothing'}, and the batches of "
        message += f"data={config.data.name} have {names}; give one of them the other's name"
        yield ConfigIssue("model", message, config.model.name)
    elif missing := [name for name in wanted if name not in taken]:
        message = f"its forward needs {', '.join(missing)}, and the batches of "
        message += f"data={config.data.name} have {names}; add it to them"
        yield ConfigIssue("model", message, config.model.name)
