"""Checks runs with structured batches or with a custom loss, before a rank starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import numpy as np
from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.axes import AXES
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.datasets.samples import CollatedSamples, Samples, taken_names
from axonlaunch.data.datasets.user_datasets.adapters import StreamedSamples
from axonlaunch.data.reading.sample_error import original

_TRIED = 2
"""Samples in the trial batch. A single sample can always be collated, so it would show nothing."""
_ANYTHING = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def custom_data_problems(
    config: RunConfig, model: nn.Module | None, dataset: Dataset | None
) -> Iterator[ConfigIssue]:
    """Yield the reasons why a run can't use its custom loss or its structured batches.

    Args:
        config: Configuration of the run.
        model: Model on the meta device; None if it could not be built.
        dataset: Dataset of the run; None if it could not be built.
    """
    structured = dataset is not None and dataset.kind == "structured"
    name = config.data.name
    if dataset is not None and needs_custom_loss(dataset) and config.train.loss is None:
        returns = "structured batches, in which the model's loss can't identify the targets"
        returns = returns if structured else "float targets, but the model's loss needs classes"
        message = f"data={name} returns {returns}; use a loss registered with register_loss"
        message += ", or return pairs of inputs and targets" if structured else ""
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


def needs_custom_loss(dataset: Dataset) -> bool:
    """Return whether the losses of models can't handle the dataset's targets."""
    return dataset.kind == "structured" or dataset.info.float_targets is not None


def first_batch(dataset: Dataset, *, size: int) -> CollatedSamples:
    """Return the first micro-batch of a dataset with structured samples.

    Raises:
        ConfigError: The dataset has no sample, or its samples can't be collated.
    """
    try:
        samples = _first(dataset, size)
    except Exception as error:  # user code may fail in any way
        issue = ConfigIssue.of_failure("data", "reading its first sample", original(error))
        raise ConfigError([issue]) from error
    if not len(samples):
        raise ConfigError([ConfigIssue("data", "the dataset is empty: it gives no sample")])
    try:
        [batch] = samples.micro_batches(size)
    except Exception as error:
        remedy = "give it a collate function that takes a list of samples"
        cause = original(error)
        issue = ConfigIssue.of_failure("data", "collating its samples", cause, then=remedy)
        raise ConfigError([issue]) from error
    return batch


def _first(dataset: Dataset, size: int) -> Samples:
    if isinstance(dataset, StreamedSamples):
        return dataset.first(size)
    samples = dataset.samples(np.arange(min(size, dataset.num_samples)), split="train")
    assert isinstance(samples, Samples)
    return samples


def _refuse_division(config: RunConfig, *, structured: bool) -> Iterator[ConfigIssue]:
    """Yield a problem for each axis that would divide the batch or the outputs."""
    reason = f"data={config.data.name} returns structured batches"
    if not structured:
        reason = f"train.loss={config.train.loss} needs the full batch and the full outputs"
    for axis in AXES:
        degree = axis.degree(config.strategy)
        if degree > 1:
            message = f"{reason}, but this splits {axis.divides} among ranks; use 1 with ddp, "
            yield ConfigIssue(axis.key, f"{message}zero1 or fsdp", degree)
    for key in ("loss_chunk", "loss_kernel"):
        if (value := getattr(config.train, key)) is not None:
            message = f"{reason}, so the loss can't be computed without all logits; use null"
            yield ConfigIssue(f"train.{key}", message, value)


def _forward_problems(
    config: RunConfig, model: nn.Module, batch: CollatedSamples
) -> Iterator[ConfigIssue]:
    """Compare the names in a batch with the parameters of the model's forward."""
    if not isinstance(batch.full, Mapping):
        return
    names = ", ".join(map(str, batch.full))
    parameters = inspect.signature(model.forward).parameters
    accepted = taken_names(model.forward, batch.full)
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _ANYTHING
    ]
    if not accepted:
        message = f"its forward takes {', '.join(parameters) or 'nothing'}, but the batches of "
        message += f"data={config.data.name} have {names}; rename one of them to match"
        yield ConfigIssue("model", message, config.model.name)
    elif missing := [name for name in required if name not in accepted]:
        message = f"its forward needs {', '.join(missing)}, but the batches of "
        message += f"data={config.data.name} have {names}; add it to the batches"
        yield ConfigIssue("model", message, config.model.name)
