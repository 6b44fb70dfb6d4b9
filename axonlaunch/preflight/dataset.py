"""Builds a run's dataset, and checks it and its match with the model, before a rank starts.

Text is tokenized only after all other checks have passed, because it may take hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from axonlaunch import data
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.axes import AXES, degrees_of, divisor
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.options.data import (
    DATASETS,
    ShapeOnlyTokensConfig,
    SyntheticTokensConfig,
)
from axonlaunch.config.options.documents import ChatConfig, TextRowsConfig
from axonlaunch.config.values.optional_keys import chat_template_of, packing_of
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.datasets.user_datasets.adapters import PairsDataset, StreamedSamples
from axonlaunch.data.hub.repository import OnDownload
from axonlaunch.data.reading.sample_error import SampleError
from axonlaunch.data.selection.pinning import commits_in, fetch_data, names_hub_data, pinned_data
from axonlaunch.data.shards.encoding import OnProgress
from axonlaunch.data.texts.chats.named_templates import chat_template
from axonlaunch.data.texts.chats.template_date import writes_date
from axonlaunch.data.texts.untokenized import find_untokenized
from axonlaunch.data.tokenizers.changed_tokenizer import add_tokens
from axonlaunch.data.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer
from axonlaunch.data.tokenizers.tokenizer_files import tokenizer_of
from axonlaunch.models.build import spec_for
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.model_spec import ModelSpec

_DATA = {
    "tokens": "data=text, documents, chat or synthetic_tokens",
    "images": "data=digits or synthetic_images",
}
"""Options of data for each kind of input of a model."""
_TRIED = 2
"""Number of samples whose shapes are compared."""


def with_hub_data(
    config: RunConfig,
    *,
    here: bool,
    resumed: Callable[[RunConfig], Mapping[str, Any]],
    report: OnDownload = lambda state: None,
) -> RunConfig:
    """Return a configuration with the commit of each data set of the Hub, after downloading them.

    Args:
        config: Configuration of the run.
        here: Whether ranks of this node read the data; if not, nothing is downloaded.
        resumed: Returns the frozen configuration of the run that is resumed, by dotted key.
        report: Called from time to time during a download.

    Raises:
        ConfigError: A data set can't be found or downloaded.
    """
    if not isinstance(config.data, TextRowsConfig) or not names_hub_data(config.data):
        return config
    data = pinned_data(config.data, earlier=commits_in(resumed(config)))
    if here:
        fetch_data(data, report=report)
    return with_values(config, {"data": data})


def with_template_date(
    config: RunConfig, *, resumed: Callable[[RunConfig], Mapping[str, Any]]
) -> RunConfig:
    """Return a configuration with the day that chat templates with a date write.

    It is the day on which the run began, so that the tokens of a run that resumes are the same.

    Args:
        config: Configuration of the run.
        resumed: Returns the frozen configuration of the run that is resumed, by dotted key.

    Raises:
        ConfigError: The tokenizer or the template can't be read.
    """
    if not isinstance(config.data, TextRowsConfig) or not _writes_date(config):
        return config
    frozen, today = resumed(config), datetime.now(UTC).date().isoformat()
    if isinstance(config.data, ChatConfig):
        day = config.data.template_date or frozen.get("data.template_date") or today
        return with_values(config, {"data.template_date": day})
    key = "data.mix.{}.template_date"
    mix = {
        name: {**options, "template_date": frozen.get(key.format(name)) or today}
        if isinstance(source := config.data.sources()[name], ChatConfig)
        and source.template_date is None
        else options
        for name, options in config.data.mix.items()
    }
    return with_values(config, {"data": replace(config.data, mix=mix)})


def _writes_date(config: RunConfig) -> bool:
    """Return whether rows are written by a chat template with a date."""
    data: Any = config.data
    rows = data.sources().values() or [data]
    if not any(isinstance(each, ChatConfig) and each.prompt_format is None for each in rows):
        return False
    if (chosen := chat_template_of(data)) is not None:
        return writes_date(chat_template(chosen))
    if config.tokenizer.name == "train":
        return False
    loaded = load_tokenizer(tokenizer_of(config))
    return isinstance(loaded, PretrainedTokenizer) and writes_date(
        str(loaded.transformers.chat_template)
    )


def dataset_without_tokenizing(config: RunConfig) -> tuple[Any, list[ConfigIssue]]:
    """Return the dataset of a run and its problems; text is described, not tokenized."""
    if not DATASETS.facts(config.data.name).takes_tokenizer:
        return make_dataset(config, lambda state: None)
    try:
        return find_untokenized(config.data, config.tokenizer), []  # type: ignore[arg-type]
    except ConfigError as error:
        return None, error.problems


def make_dataset(config: RunConfig, report: OnProgress) -> tuple[Dataset | None, list[ConfigIssue]]:
    """Return a run's dataset or the problems of building it. Text is tokenized if necessary."""
    try:
        dataset = data.build_dataset(config.data, config.tokenizer, report=report, verifies=True)
        return dataset, []
    except ConfigError as error:
        return None, error.problems
    except Exception as error:
        name = config.data.name
        if name == "custom" or not DATASETS.is_included(name):  # user code may fail in any way
            return None, [ConfigIssue.of_failure("data", "making it", error, name)]
        if not isinstance(error, ValueError | OSError | ImportError):
            raise
        return None, [ConfigIssue("data", str(error), name)]


def sample_problems(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield problems with the number, the kind or the shape of the samples."""
    facts = DATASETS.facts(config.data.name)
    if facts is not None and facts.sample is not None:
        declared = facts.sample(config.data)
        if (declared.kind, tuple(declared.shape)) != (dataset.kind, tuple(dataset.sample_shape)):
            message = (
                f"it is registered with samples of {declared.kind} {declared.shape}, which "
                f"estimates use, but returns {dataset.kind} {tuple(dataset.sample_shape)}; correct "
                "sample="
            )
            yield ConfigIssue("data.name", message, config.data.name)
    is_stream = isinstance(dataset, StreamedSamples)
    if dataset.info.is_unsized:
        if config.train.epochs is not None:
            reason = "is not known before all of it is tokenized; use data.shuffle=all or"
            if is_stream:
                reason = "is not known, because its stream has no __len__; use"
            message = f"the number of samples in the data {reason} train.steps"
            yield ConfigIssue("train.epochs", message, config.train.epochs)
        intervals = {
            "train.eval_every": config.train.eval_every,
            "checkpoint.every": config.checkpoint.every,
        }
        for key, interval in intervals.items():
            if isinstance(interval, str):
                reason = "all of it is tokenized; use data.shuffle=all, or a number of steps"
                if is_stream:
                    reason = "the stream ends; use a number of steps, or give it __len__"
                message = f"the number of samples in an epoch is not known before {reason}"
                yield ConfigIssue(key, message, interval)
    elif not is_stream and dataset.num_samples < config.train.global_batch_size:
        message = f"the data has {dataset.num_samples} samples; use fewer, or more data"
        if isinstance(config.data, TextRowsConfig):
            rows = f"the rows of {config.data.sequence_length} tokens that the data fills"
            message = f"more than {rows}: {dataset.num_samples}; use fewer, a shorter "
            message += "data.sequence_length, or more data"
        yield ConfigIssue("train.global_batch_size", message, config.train.global_batch_size)
    yield from _shape_problems(config, dataset)
    if config.train.eval_batches and not dataset.num_eval_samples:
        how = "give it an attribute held_out" if is_stream else "hold samples out"
        if isinstance(config.data, TextRowsConfig):
            how = "data.held_out=0.05"
        message = f"there is no held-out split; use 0, or {how}"
        yield ConfigIssue("train.eval_batches", message, config.train.eval_batches)


def _shape_problems(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield a problem if the first two samples have different shapes.

    A rank that reads one sample per step can train on samples of different shapes.
    """
    if not isinstance(dataset, PairsDataset) or dataset.num_samples < _TRIED:
        return
    ranks = Layout.of(config, world_size=num_ranks(config)).data_ranks
    if config.train.global_batch_size // ranks < _TRIED:
        return
    try:
        dataset.samples(range(_TRIED), split="train")
    except ConfigError as error:
        yield from error.problems
    except SampleError:  # the rank that reads the sample reports it
        return


def with_steps(config: RunConfig, dataset: Dataset, *, first_row_at: int = 0) -> RunConfig:
    """Resolve ``train.epochs`` to the number of steps of that many passes over the data.

    Args:
        config: Configuration of the run.
        dataset: Dataset that ``config.data`` describes.
        first_row_at: Number of samples that the run read from other data, before
            ``checkpoint.changed_data=restart``.
    """
    train = config.train
    if train.epochs is None:
        return config
    # As a decimal: 1.1 * 100 is above 110 in binary, which would add a step.
    samples = first_row_at + Fraction(str(train.epochs)) * dataset.num_samples
    steps = math.ceil(samples / train.global_batch_size)
    return with_values(config, {"train.steps": steps, "train.epochs": None})


def with_packing(config: RunConfig) -> RunConfig:
    """Resolve ``data.packing=auto`` to ``none`` if the model can't separate documents in a row."""
    if packing_of(config.data) != "auto":
        return config
    try:
        spec = spec_for(config)
    except ConfigError:
        return config  # problems of the model are reported later with all others
    divided = divisor(degrees_of(config.strategy), "sequences") > 1
    if not spec.unpackable() and (spec.shards_documents or not divided):
        return config
    settings: dict[str, Any] = {"data.packing": "none"}
    if isinstance(config.data, ShapeOnlyTokensConfig):
        settings["data.document_length"] = None
    return with_values(config, settings)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Grow the vocabulary of a transformers model to the tokens that the tokenizer gets.

    A model with enough rows, such as one with a padded vocabulary, is not changed. An adapter also
    trains the embedding and the head, because the rows of new tokens have learned nothing. The same
    holds if ``model.config`` grows the vocabulary.

    Raises:
        ConfigError: The tokenizer or the model can't be read.
    """
    source = source_of(config)
    is_grown = config.adapter is not None and source.has_grown_vocabulary()
    if not (is_grown or config.tokenizer.new_tokens()):
        return config
    if not (ends := source.vocabulary_parameters()):
        return config
    if config.tokenizer.new_tokens():
        config, has_new = _with_rows_of_tokens(config)
        is_grown = is_grown or has_new
    if config.adapter is None or not is_grown:
        return config
    more = [name for name in ends if name not in config.train.unfreeze]
    return with_values(config, {"train.unfreeze": [*config.train.unfreeze, *more]})


def _with_rows_of_tokens(config: RunConfig) -> tuple[RunConfig, bool]:
    """Grow the vocabulary to the tokenizer's tokens; return also whether any of them is new."""
    tokenizer = tokenizer_of(config)
    if tokenizer.name == "train":
        size, is_new = tokenizer.vocab_size + len(tokenizer.new_tokens()), True
    else:
        loaded = add_tokens(load_tokenizer(tokenizer), tokenizer)
        assert isinstance(loaded, PretrainedTokenizer)
        size, is_new = loaded.vocab_size, bool(loaded.added)
    return with_values(config, source_of(config).with_vocabulary(size)), is_new


def packing_problems(
    config: RunConfig, spec: ModelSpec, dataset: Dataset | None
) -> Iterator[ConfigIssue]:
    """Yield a problem if rows have several documents and the model can't separate them."""
    if dataset is None or not dataset.info.is_packed:
        return
    field, value, instead = _packing_key(config.data)
    if reason := spec.unpackable():
        message = f"a row holds several documents, and model={config.model.name} can't keep them "
        message += f"apart: {reason}; use {instead}"
        yield ConfigIssue(f"data.{field}", message, value)
    for axis in AXES:
        degree = axis.degree(config.strategy)
        if axis.divides != "sequences" or degree == 1 or spec.shards_documents:
            continue
        message = f"a row holds several documents, which model={config.model.name} can't keep "
        message += f"apart with {axis.word} parallelism; "
        message += f"use {instead}, or {axis.key}=1 instead of {degree}"
        yield ConfigIssue(f"data.{field}", message, value)


def _packing_key(data: Any) -> tuple[str, Any, str]:
    """Return the key that puts several documents into a row, its value, and what to use instead."""
    if isinstance(data, TextRowsConfig | ShapeOnlyTokensConfig):
        return "packing", data.packing, "none"
    if isinstance(data, SyntheticTokensConfig):
        return "document_length", data.document_length, "null"
    return "name", data.name, "a dataset with one document per row"


def model_data_mismatches(
    config: RunConfig, spec: ModelSpec, dataset: Dataset, module: nn.Module | None
) -> Iterator[ConfigIssue]:
    """Yield mismatches between the settings of the model and those of the data.

    Args:
        config: Configuration of the run.
        spec: Specification of the model.
        dataset: Dataset of the run.
        module: The model without storage; None if it can't be built.
    """
    source, name = source_of(config), config.data.name
    if dataset.kind == "structured":
        return
    if spec.inputs not in ("any", dataset.kind):
        message = f"needs {spec.inputs}, but data={name} has {dataset.kind}"
        message += f"; use {_DATA[spec.inputs]}, or another model"
        yield ConfigIssue("model.name", message, config.model.name)
        return
    size = source.size("vocab_size")
    if dataset.kind == "tokens" and size is not None and size < dataset.num_classes:
        has = f"data={name} has" if config.tokenizer.path is None else "the tokenizer has"
        message = f"{has} {dataset.num_classes} tokens; use {dataset.num_classes} or more"
        yield ConfigIssue("model.vocab_size", message, size)
    yield from _too_long_rows(config, spec, module)
    classes = source.size("num_classes")
    if dataset.kind == "images" and classes is not None and classes < dataset.num_classes:
        message = f"data={name} has {dataset.num_classes} classes; use {dataset.num_classes}"
        yield ConfigIssue("model.num_classes", message, classes)
    yield from _image_shape(config, dataset)


def _too_long_rows(
    config: RunConfig, spec: ModelSpec, module: nn.Module | None
) -> Iterator[ConfigIssue]:
    """Yield a problem if rows are longer than the model's longest sequence."""
    source, length = source_of(config), config.sequence_length
    longest = spec.max_positions
    longest = source.size("max_position_embeddings") if longest is None else longest
    if longest is None or length is None or length <= longest:
        return
    remedy = f"use {longest} or less, or set {source.setting('max_position_embeddings', length)}"
    if config.is_pretrained and module is not None and _learns_positions(module, longest):
        remedy = f"use {longest} or less, because its weights have a row for each position"
    message = f"longer than {source.sizes_key}.max_position_embeddings={longest}; {remedy}"
    yield ConfigIssue("data.sequence_length", message, length)


def _learns_positions(model: Any, longest: int) -> bool:
    """Return whether a model of transformers has a table of learned positions.

    Some tables have two more rows, for padding (OPT).
    """
    tokens = model.get_input_embeddings()
    return any(
        isinstance(part, nn.Embedding) and part.num_embeddings in (longest, longest + 2)
        for part in model.modules()
        if part is not tokens
    )


def _image_shape(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Compare the sizes in an image model's configuration with those of the images."""
    if dataset.kind != "images":
        return
    shape, source = dataset.sample_shape, source_of(config)
    numel = torch.Size(shape).numel()
    input_size = source.size("input_size")
    if input_size is not None and input_size != numel:
        yield ConfigIssue(
            "model.input_size", f"the images are {_by(shape)}; use {numel}", input_size
        )
    for field, actual in (("num_channels", shape[0]), ("image_size", shape[-1])):
        configured = source.size(field)
        if configured is not None and configured != actual:
            yield ConfigIssue(
                f"model.{field}", f"the images are {_by(shape)}; use {actual}", configured
            )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
