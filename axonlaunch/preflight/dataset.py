"""A run's dataset before there is a rank: what it is, and what is wrong with it.

Text is tokenised last, when all else was found to be well, for it may take hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from axonlaunch import data
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.data import DATASETS, ShapeOnlyTokensConfig
from axonlaunch.config.documents import TextRowsConfig
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.encoding import OnProgress
from axonlaunch.data.text_rows import find_untokenised
from axonlaunch.data.user_datasets import StreamedSamples
from axonlaunch.models.build import spec_for
from axonlaunch.models.spec import ModelSpec

_DOCUMENT_LENGTH = ("document_length", "null")
"""Of made-up data, the key by which rows hold several documents, and what undoes it."""


def described_dataset(config: RunConfig) -> tuple[Any, list[ConfigIssue]]:
    """Return a run's dataset, or of text, which takes long to tokenise, what is known before."""
    if not DATASETS.facts(config.data.name).takes_tokenizer:
        return make_dataset(config, lambda state: None)
    try:
        return find_untokenised(config.data, config.tokenizer), []  # type: ignore[arg-type]
    except ConfigError as error:
        return None, error.problems


def make_dataset(config: RunConfig, report: OnProgress) -> tuple[Dataset | None, list[ConfigIssue]]:
    """Return a run's dataset, or why there is none; text is tokenised if it is not yet."""
    try:
        made = data.build_dataset(config.data, config.tokenizer, report=report, verifies=True)
        return made, []
    except ConfigError as error:
        return None, error.problems
    except Exception as error:
        name = config.data.name
        if name == "custom" or not DATASETS.is_included(name):  # it may fail in any way
            return None, [ConfigIssue.of_failure("data", "making it", error, name)]
        if not isinstance(error, ValueError | OSError | ImportError):
            raise
        return None, [ConfigIssue("data", str(error), name)]


def sample_problems(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield what is wrong with how many samples there are, or what they are."""
    facts = DATASETS.facts(config.data.name)
    if facts is not None and facts.sample is not None:
        said = facts.sample(config.data)
        if (said.kind, tuple(said.shape)) != (dataset.kind, tuple(dataset.sample_shape)):
            message = (
                f"it is registered with samples of {said.kind} {said.shape}, by which it is "
                f"estimated, and gives {dataset.kind} {tuple(dataset.sample_shape)}; mend sample="
            )
            yield ConfigIssue("data.name", message, config.data.name)
    is_stream = isinstance(dataset, StreamedSamples)
    if dataset.info.is_unsized:
        if config.train.epochs is not None:
            why = "is not known before all of it is tokenised; use data.shuffle=all, or"
            if is_stream:
                why = "is not known, for its stream has no __len__; use"
            message = f"how many samples the data has {why} train.steps"
            yield ConfigIssue("train.epochs", message, config.train.epochs)
    elif not is_stream and dataset.num_samples < config.train.global_batch_size:
        message = f"the data has {dataset.num_samples} samples; use fewer, or more data"
        if isinstance(config.data, TextRowsConfig):
            rows = f"the rows of {config.data.sequence_length} tokens that the data fills"
            message = f"more than {rows}: {dataset.num_samples}; use fewer, a shorter "
            message += "data.sequence_length, or more data"
        yield ConfigIssue("train.global_batch_size", message, config.train.global_batch_size)
    if config.train.eval_batches and not dataset.num_eval_samples:
        how = "give it an attribute held_out" if is_stream else "hold samples out"
        if hasattr(config.data, "held_out"):
            how = "data.held_out=0.05"
        message = f"there is no held-out split; use 0, or {how}"
        yield ConfigIssue("train.eval_batches", message, config.train.eval_batches)


def with_steps(config: RunConfig, dataset: Dataset, *, first_row_at: int = 0) -> RunConfig:
    """Resolve ``train.epochs`` to the steps in which every training row was seen as often.

    Args:
        config: The run's.
        dataset: What ``config.data`` describes.
        first_row_at: Samples of other data that the run saw before the first row of this.
    """
    train = config.train
    if train.epochs is None:
        return config
    samples = first_row_at + train.epochs * dataset.num_samples
    steps = math.ceil(samples / train.global_batch_size)
    return with_values(config, {"train.steps": steps, "train.epochs": None})


def with_packing(config: RunConfig) -> RunConfig:
    """Resolve ``data.packing=auto`` to ``none`` if nothing would keep documents of a row apart."""
    if getattr(config.data, "packing", None) != "auto":
        return config
    try:
        spec = spec_for(config)
    except ConfigError:
        return config  # the model's problems are reported with all others
    if not spec.unpackable() and (spec.divides_documents or config.strategy.context.degree == 1):
        return config
    settings: dict[str, Any] = {"data.packing": "none"}
    if isinstance(config.data, ShapeOnlyTokensConfig):
        settings["data.document_length"] = None
    return with_values(config, settings)


def packing_problems(
    config: RunConfig, spec: ModelSpec, dataset: Dataset | None
) -> Iterator[ConfigIssue]:
    """Refuse rows of several documents where nothing would keep them apart."""
    if dataset is None or not dataset.info.is_packed:
        return
    field, instead = ("packing", "none") if hasattr(config.data, "packing") else _DOCUMENT_LENGTH
    value = getattr(config.data, field)
    if reason := spec.unpackable():
        message = f"a row holds several documents, and model={config.model.name} can't keep them "
        message += f"apart: {reason}; use {instead}"
        yield ConfigIssue(f"data.{field}", message, value)
    if (degree := config.strategy.context.degree) > 1 and not spec.divides_documents:
        message = f"a row holds several documents, which model={config.model.name} does not keep "
        message += "apart where attention is divided; "
        message += f"use {instead}, or strategy.context.degree=1 in place of {degree}"
        yield ConfigIssue(f"data.{field}", message, value)
