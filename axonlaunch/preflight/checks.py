"""Runs all checks of a configuration that need torch, the model or the data, but no rank.

The checks run in a separate process before any rank starts. All problems are collected and reported
together.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import nn

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.axes import PRINTED
from axonlaunch.config.code.plugins import import_callable, import_plugins
from axonlaunch.config.consistency.layout import Layout, num_ranks, resolved, with_backend
from axonlaunch.config.consistency.rules import find_rule_violations
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.options.loggers import CustomLoggerConfig
from axonlaunch.config.options.model import OWN_MODEL_CONFIGS, CustomConfig, HuggingFaceConfig
from axonlaunch.config.values.url import is_url
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.shards.encoding import OnProgress, Tokenising
from axonlaunch.data.texts.untokenised import Untokenised
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.models.specs.spec import ModelSpec
from axonlaunch.models.specs.trainable import frozen_problems
from axonlaunch.preflight.adapter import find_adapter_problems, with_adapter_settings
from axonlaunch.preflight.checkpoint import (
    changed_data_problems,
    checkpoint_problems,
    epochs_problems,
    first_row_at,
)
from axonlaunch.preflight.custom_data import custom_data_problems, needs_custom_loss
from axonlaunch.preflight.dataset import (
    described_dataset,
    make_dataset,
    packing_problems,
    sample_problems,
    with_packing,
    with_steps,
)
from axonlaunch.preflight.devices import accelerators, device_problems, memory_of_a_rank
from axonlaunch.preflight.model_outputs import (
    head_problems,
    loss_term_problems,
    output_problems,
)
from axonlaunch.preflight.module_trace import trace_problems
from axonlaunch.preflight.optimizer import optimizer_problems, rate_problems
from axonlaunch.preflight.parallelism import (
    AXIS_PROBLEMS,
    first_four,
    sharding_problems,
    statistics_problems,
)
from axonlaunch.preflight.paths import with_absolute_paths
from axonlaunch.system.storage.disk import free_bytes
from axonlaunch.system.text.formatting import size


def resolve(config: RunConfig, *, devices: int | None = None) -> RunConfig:
    """Resolve values that depend on this node, and run all checks that need no rank.

    Args:
        config: Configuration of a run.
        devices: Number of ranks on this node that can have a separate device; None counts the
            devices.

    Raises:
        ConfigError: The configuration has problems; all are reported together.
    """
    devices = accelerators(config) if devices is None else devices
    return _resolve(config, devices=devices, here=True)


def resolving(
    config: RunConfig, *, devices: int | None = None
) -> Generator[Tokenising, None, RunConfig]:
    """Resolve and check as ``resolve`` does, and yield the progress of tokenization.

    Raises:
        ConfigError: The configuration has problems; all are reported together.
    """
    devices = accelerators(config) if devices is None else devices
    states: SimpleQueue[Tokenising | None] = SimpleQueue()
    with ThreadPoolExecutor(1, thread_name_prefix="checking") as pool:
        checking = pool.submit(_resolve, config, devices=devices, here=True, report=states.put)
        checking.add_done_callback(lambda _: states.put(None))
        while (state := states.get()) is not None:
            yield state
        return checking.result()


def resolve_anywhere(config: RunConfig) -> RunConfig:
    """Resolve ``launch.nproc`` and run the checks that apply to every node with the run's devices.

    Raises:
        ConfigError: The configuration has problems; all are reported together.
    """
    devices = accelerators(config) if config.launch.nproc == "auto" else 0
    return _resolve(config, devices=devices, here=False)


def _resolve(
    config: RunConfig, *, devices: int, here: bool, report: OnProgress = lambda state: None
) -> RunConfig:
    import_plugins(config.plugins)  # the parent has imported them, but in another process
    config = resolved(config, accelerators=devices)
    if here:
        config = with_backend(config, accelerators=devices)
    if problems := fetch_model(config, here=here):
        raise ConfigError(problems)
    config = with_packing(with_adapter_settings(with_absolute_paths(config)))
    problems, dataset = _examine(config, devices=devices if here else None, report=report)
    if here and dataset is not None and not problems:
        epochs = config.train.epochs
        config = with_steps(config, dataset, first_row_at=first_row_at(config, dataset))
        problems = find_rule_violations(config)  # again, because the number of steps is now known
        problems += epochs_problems(config, epochs=epochs)
        problems += rate_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def find_issues(config: RunConfig, *, devices: int | None) -> list[ConfigIssue]:
    """Return the problems of a configuration with resolved ``launch.nproc``.

    Args:
        config: Configuration of the run.
        devices: Number of ranks on this node that can have a separate device. Devices, memory,
            disk, data and checkpoints of this node are then checked too. None skips these checks.
    """
    return _examine(config, devices=devices, report=lambda state: None)[0]


def _examine(
    config: RunConfig, *, devices: int | None, report: OnProgress
) -> tuple[list[ConfigIssue], Dataset | None]:
    """Return the problems of a configuration, and its dataset if it was built."""
    here = devices is not None
    ranks = num_ranks(config)
    layout = Layout.of(config, world_size=ranks)
    # Check the rules again after resolving, because each rank checks its configuration too.
    problems = find_rule_violations(config)
    if devices is not None:
        problems += device_problems(config, devices)
        problems += _custom_loggers(config)
        problems += _attention(config)
    dataset, issues = described_dataset(config)
    problems += issues
    spec, model, issues = _model(config)
    problems += issues
    if here and dataset is not None and not isinstance(dataset, Untokenised):
        problems += sample_problems(config, dataset)
    if spec is not None:
        problems += loss_term_problems(config.train, spec)
    if spec is not None and dataset is not None:
        mismatches = list(_model_data_mismatches(config, spec, dataset))
        if needs_custom_loss(dataset) or config.train.loss is not None:
            mismatches = list(custom_data_problems(config, model, dataset))
        elif not mismatches and model is not None and type(config.model) not in OWN_MODEL_CONFIGS:
            mismatches = list(_with_model_key(config, output_problems(model, spec, dataset)))
        problems += mismatches
        chunk = config.train.loss_chunk
        if not mismatches and model is not None and chunk is not None:
            problems += head_problems(model, spec, dataset, chunk=chunk)
    if model is not None and spec is not None:
        problems += sharding_problems(config, spec, model)
        problems += statistics_problems(config, model)
        problems += packing_problems(config, spec, dataset)
        for axis in PRINTED:
            problems += AXIS_PROBLEMS[axis.name](config, spec, model)
    issues = [] if spec is None or model is None else optimizer_problems(config, spec, model)
    problems += issues
    if here and model is not None and not issues:
        problems += _memory(config, model, layout)
        problems += _disk(config, model)
        if dataset is not None and config.train.trace.tensors == "full":
            problems += trace_problems(config, model, dataset)
        problems += checkpoint_problems(config, model)
    if here and isinstance(dataset, Untokenised) and not problems:
        dataset, problems = make_dataset(config, report)
        problems += [] if dataset is None else sample_problems(config, dataset)
    if here and dataset is not None and not isinstance(dataset, Untokenised) and not problems:
        problems += changed_data_problems(config, dataset)
    return problems, None if isinstance(dataset, Untokenised) else dataset


def fetch_model(config: RunConfig, *, here: bool) -> list[ConfigIssue]:
    """Download the model from the Hugging Face Hub to its cache, once for all ranks."""
    if not isinstance(config.model, HuggingFaceConfig):
        return []
    from axonlaunch.models.hf.reading import files

    try:
        files.fetch(config.model, weights=here and config.model.init == "pretrained")
    except ConfigError as error:
        return error.problems
    return []


def _custom_loggers(config: RunConfig) -> Iterator[ConfigIssue]:
    """Import custom loggers. They are built later, on the main rank."""
    for number, logger in enumerate(config.loggers):
        if isinstance(logger, CustomLoggerConfig):
            try:
                import_callable(f"loggers[{number}].target", logger.target, logger.arguments)
            except ConfigError as error:
                yield from error.problems


def _attention(config: RunConfig) -> Iterator[ConfigIssue]:
    model = config.model
    on_cpu = config.launch.device != "cuda"
    if isinstance(model, HuggingFaceConfig) and model.attention == "flex" and on_cpu:
        message = "torch can't train with it on CPUs; use sdpa"
        yield ConfigIssue("model.attention", message, "flex")


def build_on_meta(config: RunConfig, spec: ModelSpec) -> nn.Module:
    """Build a run's model without storage.

    Raises:
        ConfigError: The builder fails, or the model does not have the blocks that ``spec`` names.
    """
    try:
        model = on_meta(config, seed=config.seed)
        spec.blocks(model)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a custom builder may fail in any way
        issue = ConfigIssue.of_failure("model", "building it", error, config.model.name)
        raise ConfigError([issue]) from error
    return model


def _model(
    config: RunConfig,
) -> tuple[ModelSpec | None, nn.Module | None, list[ConfigIssue]]:
    """Return the specification, the model without storage, and the problems of building it."""
    spec = None
    try:
        spec = spec_for(config)
        model = build_on_meta(config, spec)
    except ConfigError as error:
        return spec, None, error.problems
    issues = list(find_adapter_problems(config, spec, model))
    if issues := [*issues, *frozen_problems(model, config.train)]:
        return spec, None, issues
    if not any(parameter.requires_grad for parameter in model.parameters()):
        message = "it has no parameter that can be trained"
        return spec, None, [ConfigIssue("model", message, config.model.name)]
    if spec.initializers is not None:
        initializers = spec.initializers(model)
        if missing := [name for name, _ in model.named_parameters() if name not in initializers]:
            message = f"initializers= returns no entry for {first_four(missing)}; add it"
            return spec, None, [ConfigIssue("model", message, config.model.name)]
    return spec, model, []


def _model_data_mismatches(
    config: RunConfig, spec: ModelSpec, dataset: Dataset
) -> Iterator[ConfigIssue]:
    """Yield mismatches between the settings of the model and those of the data."""
    model, name = config.model, config.data.name
    if dataset.kind == "structured":
        return
    if spec.inputs not in ("any", dataset.kind):
        message = f"needs {spec.inputs}, but data={name} has {dataset.kind}"
        yield ConfigIssue("model.name", message, model.name)
        return
    size = getattr(model, "vocab_size", None)
    if dataset.kind == "tokens" and size is not None and size < dataset.num_classes:
        has = f"data={name} has" if config.tokenizer.path is None else "the tokenizer has"
        message = f"{has} {dataset.num_classes} tokens; use {dataset.num_classes} or more"
        yield ConfigIssue("model.vocab_size", message, size)
    longest, length = getattr(model, "max_position_embeddings", None), _length(config)
    longest = longest if spec.max_positions is None else spec.max_positions
    if longest is not None and length is not None and length > longest:
        group = "model.config" if isinstance(model, HuggingFaceConfig) else "model"
        # The number of positions of a pretrained model can't be changed.
        remedy = "shorten it" if config.is_pretrained else "shorten it or raise that"
        message = f"longer than {group}.max_position_embeddings={longest}; {remedy}"
        yield ConfigIssue("data.sequence_length", message, length)
    classes = getattr(model, "num_classes", None)
    if dataset.kind == "images" and classes is not None and classes < dataset.num_classes:
        message = f"data={name} has {dataset.num_classes} classes; use {dataset.num_classes}"
        yield ConfigIssue("model.num_classes", message, classes)
    yield from _image_shape(config, dataset)


def _with_model_key(config: RunConfig, problems: Iterable[ConfigIssue]) -> Iterator[ConfigIssue]:
    """Yield the problems with the configuration key by which the user chose the model."""
    for problem in problems:
        if isinstance(config.model, CustomConfig):
            yield ConfigIssue("model.target", problem.message, config.model.target)
        elif isinstance(config.model, HuggingFaceConfig):
            key = "model.config" if config.model.path is None else "model.path"
            yield ConfigIssue(key, problem.message, config.model.path or ...)
        else:
            yield ConfigIssue("model.name", problem.message, config.model.name)


def _image_shape(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Compare the sizes in an image model's configuration with those of the images."""
    if dataset.kind != "images":
        return
    shape = dataset.sample_shape
    numel = torch.Size(shape).numel()
    input_size = getattr(config.model, "input_size", None)
    if input_size is not None and input_size != numel:
        yield ConfigIssue(
            "model.input_size", f"the images are {_by(shape)}; use {numel}", input_size
        )
    for field, actual in (("num_channels", shape[0]), ("image_size", shape[-1])):
        configured = getattr(config.model, field, None)
        if configured is not None and configured != actual:
            yield ConfigIssue(
                f"model.{field}", f"the images are {_by(shape)}; use {actual}", configured
            )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _length(config: RunConfig) -> int | None:
    length = getattr(config.data, "sequence_length", None)
    return length if isinstance(length, int) else None


def _memory(config: RunConfig, model: nn.Module, layout: Layout) -> Iterator[ConfigIssue]:
    """Yield a problem if parameters, gradients and optimizer states exceed the memory of a rank.

    Activations are not counted.
    """
    count = sum(p.numel() for p in model.parameters())
    parameters = count // layout.parameter_divisor
    element = config.train.parameter_bytes
    shares = TrainingShares.of(config)
    per_element = element * (
        1 / layout.parameter_shards
        + shares.gradients / layout.gradient_shards
        + shares.states / layout.optimizer_shards
    )
    per_rank = int(parameters * per_element)
    memory, owner = min(_memory_limits(config))
    offload = config.strategy.fsdp.cpu_offload
    if per_rank > memory and offload == "none":
        message = (
            f"{count / 1e9:.3g}B parameters with gradients and optimizer states take "
            f"{per_rank / GIB:.1f} GiB per rank; {owner} has {memory / GIB:.1f} GiB: "
            "use a smaller model, more ranks with strategy=fsdp, or larger devices"
        )
        yield ConfigIssue("model", message, config.model.name)


def _memory_limits(config: RunConfig) -> Iterator[tuple[int, str]]:
    """Yield the memory of a rank on the configured hardware and on this node, with descriptions."""
    hardware = config.hardware
    if hardware is not None and hardware.memory_bytes is not None:
        yield hardware.memory_bytes, f"hardware={hardware.name}"
    yield memory_of_a_rank(config)


def _disk(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield a problem if the checkpoints do not fit on the disk."""
    if not config.checkpoint.every:
        return
    count = sum(p.numel() for p in model.parameters())
    num_checkpoints = (
        config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    )  # and the one being written
    shares = TrainingShares.of(config)
    saved = 1 if config.saves_frozen else shares.gradients
    per_checkpoint = count * config.train.parameter_bytes * (saved + shares.states)
    needed = int(per_checkpoint) * num_checkpoints
    path = config.checkpoint.path or config.run_dir
    if is_url(path):  # the free space of remote storage is not known
        return
    folder, free = free_bytes(Path(path if path != "auto" else "runs"))
    if not os.access(folder, os.W_OK):
        key = "checkpoint.path" if config.checkpoint.path else "run_dir"
        yield ConfigIssue(key, f"{folder} can't be written to; use another", path)
    elif needed > free:
        message = (
            f"checkpoints take up to {size(needed)}, but {folder} has {size(free)} free; keep "
            "fewer, use another run_dir, or checkpoint.every=0"
        )
        yield ConfigIssue("checkpoint.keep_last", message, config.checkpoint.keep_last)
