"""Every check of a configuration that needs torch, the model or the data, but no rank.

It gathers problems; each package knows its own. It runs in a process of its own, before any rank.
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
from axonlaunch.config.hardware import GIB
from axonlaunch.config.layout import Layout, num_ranks, resolved, with_backend
from axonlaunch.config.loggers import CustomLoggerConfig
from axonlaunch.config.model import OWN_MODEL_CONFIGS, CustomConfig, HuggingFaceConfig
from axonlaunch.config.plugins import import_callable, import_plugins
from axonlaunch.config.rules import find_rule_violations
from axonlaunch.config.url import is_url
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.encoding import OnProgress, Tokenising
from axonlaunch.data.text_rows import Untokenised
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.parameter_facts import TrainingShares
from axonlaunch.models.spec import ModelSpec
from axonlaunch.models.trained import frozen_problems
from axonlaunch.preflight.adapter import find_adapter_problems, with_adapter_settings
from axonlaunch.preflight.checkpoint import (
    changed_data_problems,
    checkpoint_problems,
    epochs_problems,
    first_row_at,
)
from axonlaunch.preflight.dataset import (
    described_dataset,
    make_dataset,
    packing_problems,
    sample_problems,
    with_packing,
    with_steps,
)
from axonlaunch.preflight.devices import accelerators, device_problems, memory_of_a_rank
from axonlaunch.preflight.model_outputs import head_problems, output_problems
from axonlaunch.preflight.module_trace import trace_problems
from axonlaunch.preflight.optimizer import optimizer_problems
from axonlaunch.preflight.own_data import needs_own_loss, own_data_problems
from axonlaunch.preflight.parallelism import (
    AXIS_PROBLEMS,
    first_four,
    sharding_problems,
    statistics_problems,
)
from axonlaunch.preflight.paths import with_absolute_paths
from axonlaunch.system.disk import free_bytes
from axonlaunch.system.formatting import size


def resolve(config: RunConfig, *, devices: int | None = None) -> RunConfig:
    """Resolve what was left to the node and check everything that can be checked without a rank.

    Args:
        config: A run's.
        devices: How many ranks of this node can have a device of their own; None: it is found.

    Raises:
        ConfigError: Every problem, all at once.
    """
    devices = accelerators(config) if devices is None else devices
    return _resolve(config, devices=devices, here=True)


def resolving(
    config: RunConfig, *, devices: int | None = None
) -> Generator[Tokenising, None, RunConfig]:
    """Do as ``resolve`` does, and yield how far text is tokenised.

    Raises:
        ConfigError: Every problem, all at once.
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
    """Resolve ``launch.nproc`` and check what holds on every node that has the devices.

    Raises:
        ConfigError: Every problem, all at once.
    """
    devices = accelerators(config) if config.launch.nproc == "auto" else 0
    return _resolve(config, devices=devices, here=False)


def _resolve(
    config: RunConfig, *, devices: int, here: bool, report: OnProgress = lambda state: None
) -> RunConfig:
    import_plugins(config.plugins)  # the parent did, but this is another process
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
        problems = find_rule_violations(config)  # some are about the number of steps
        problems += epochs_problems(config, epochs=epochs)
    if problems:
        raise ConfigError(problems)
    return config


def find_issues(config: RunConfig, *, devices: int | None) -> list[ConfigIssue]:
    """Return what is wrong with a configuration whose ``launch.nproc`` is known.

    Args:
        config: The run's.
        devices: How many ranks of this node, which is to run it, can have a device of their own:
            its devices, memory, disk, data and checkpoints then have to suffice. None: it need not.
    """
    return _examine(config, devices=devices, report=lambda state: None)[0]


def _examine(
    config: RunConfig, *, devices: int | None, report: OnProgress
) -> tuple[list[ConfigIssue], Dataset | None]:
    """Return what is wrong with a configuration, and its dataset where that was made."""
    here = devices is not None
    ranks = num_ranks(config)
    layout = Layout.of(config, world_size=ranks)
    # Again, now that all is resolved: each rank holds what it reads of the run against them.
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
    if spec is not None and dataset is not None:
        unfit = list(_fit_each_other(config, spec, dataset))
        if needs_own_loss(dataset) or config.train.loss is not None:
            unfit = list(own_data_problems(config, model, dataset))
        elif not unfit and model is not None and type(config.model) not in OWN_MODEL_CONFIGS:
            unfit = list(_name_model(config, output_problems(model, spec, dataset)))
        problems += unfit
        chunk = config.train.loss_chunk
        if not unfit and model is not None and chunk is not None:
            problems += head_problems(model, spec, dataset, chunk=chunk)
    if model is not None and spec is not None:
        problems += sharding_problems(config, spec, model)
        problems += statistics_problems(config, model)
        problems += packing_problems(config, spec, dataset)
        for axis in PRINTED:
            problems += AXIS_PROBLEMS[axis.name](config, spec, model)
    unfit = [] if spec is None or model is None else optimizer_problems(config, spec, model)
    problems += unfit
    if here and model is not None and not unfit:
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
    """Bring what the Hugging Face Hub has of the model into its cache, once for all ranks."""
    if not isinstance(config.model, HuggingFaceConfig):
        return []
    from axonlaunch.models.hf import files

    try:
        files.fetch(config.model, weights=here and config.model.init == "pretrained")
    except ConfigError as error:
        return error.problems
    return []


def _custom_loggers(config: RunConfig) -> Iterator[ConfigIssue]:
    """Import them; each is made on the main rank, once it is running."""
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
        ConfigError: Its builder fails, or what it built has not the blocks that ``spec`` names.
    """
    try:
        model = on_meta(config, seed=config.seed)
        spec.blocks(model)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's own builder may fail in any way
        issue = ConfigIssue.of_failure("model", "building it", error, config.model.name)
        raise ConfigError([issue]) from error
    return model


def _model(
    config: RunConfig,
) -> tuple[ModelSpec | None, nn.Module | None, list[ConfigIssue]]:
    """Build the model without storage."""
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
        started = spec.initializers(model)
        if unstarted := [name for name, _ in model.named_parameters() if name not in started]:
            message = (
                f"initializers= gives nothing for {first_four(unstarted)}; add it by that name"
            )
            return spec, None, [ConfigIssue("model", message, config.model.name)]
    return spec, model, []


def _fit_each_other(config: RunConfig, spec: ModelSpec, dataset: Dataset) -> Iterator[ConfigIssue]:
    model, name = config.model, config.data.name
    if dataset.kind == "structured":
        return
    if spec.inputs not in ("any", dataset.kind):
        message = f"is fed {spec.inputs}, but data={name} gives {dataset.kind}"
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
        of = "model.config" if isinstance(model, HuggingFaceConfig) else "model"
        # A pretrained model has as many positions as it was trained with.
        less = "shorten it" if config.is_pretrained else "shorten it or raise that"
        message = f"longer than {of}.max_position_embeddings={longest}; {less}"
        yield ConfigIssue("data.sequence_length", message, length)
    classes = getattr(model, "num_classes", None)
    if dataset.kind == "images" and classes is not None and classes < dataset.num_classes:
        message = f"data={name} has {dataset.num_classes} classes; use {dataset.num_classes}"
        yield ConfigIssue("model.num_classes", message, classes)
    yield from _image_shape(config, dataset)


def _name_model(config: RunConfig, problems: Iterable[ConfigIssue]) -> Iterator[ConfigIssue]:
    """Say of which model the problems are: by what the user chose it."""
    for problem in problems:
        if isinstance(config.model, CustomConfig):
            yield ConfigIssue("model.target", problem.message, config.model.target)
        elif isinstance(config.model, HuggingFaceConfig):
            key = "model.config" if config.model.path is None else "model.path"
            yield ConfigIssue(key, problem.message, config.model.path or ...)
        else:
            yield ConfigIssue("model.name", problem.message, config.model.name)


def _image_shape(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Compare the figures of a model of images with those of the images."""
    if dataset.kind != "images":
        return
    shape = dataset.sample_shape
    numel = torch.Size(shape).numel()
    input_size = getattr(config.model, "input_size", None)
    if input_size is not None and input_size != numel:
        yield ConfigIssue(
            "model.input_size", f"the images are {_by(shape)}; use {numel}", input_size
        )
    for field, seen in (("num_channels", shape[0]), ("image_size", shape[-1])):
        input_size = getattr(config.model, field, None)
        if input_size is not None and input_size != seen:
            yield ConfigIssue(
                f"model.{field}", f"the images are {_by(shape)}; use {seen}", input_size
            )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _length(config: RunConfig) -> int | None:
    length = getattr(config.data, "sequence_length", None)
    return length if isinstance(length, int) else None


def _memory(config: RunConfig, model: nn.Module, layout: Layout) -> Iterator[ConfigIssue]:
    """Refuse what cannot fit: the states alone, without activations, against what a device has."""
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
    memory, where = min(_rooms(config))
    offload = config.strategy.fsdp.cpu_offload
    if per_rank > memory and offload == "none":
        message = (
            f"{count / 1e9:.3g}B parameters with gradients and optimizer states take "
            f"{per_rank / GIB:.1f} GiB per rank; {where} has {memory / GIB:.1f} GiB: "
            "use a smaller model, more ranks with strategy=fsdp, or larger devices"
        )
        yield ConfigIssue("model", message, config.model.name)


def _rooms(config: RunConfig) -> Iterator[tuple[int, str]]:
    """Yield the bytes that a rank may take: of what runs it here, and of the hardware it names."""
    hardware = config.hardware
    if hardware is not None and hardware.memory_bytes is not None:
        yield hardware.memory_bytes, f"hardware={hardware.name}"
    yield memory_of_a_rank(config)


def _disk(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    """Refuse a run whose checkpoints can't fit the disk."""
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
    where = config.checkpoint.path or config.run_dir
    if is_url(where):  # a bucket's free space is not known
        return
    folder, free = free_bytes(Path(where if where != "auto" else "runs"))
    if not os.access(folder, os.W_OK):
        key = "checkpoint.path" if config.checkpoint.path else "run_dir"
        yield ConfigIssue(key, f"{folder} can't be written to; use another", where)
    elif needed > free:
        message = (
            f"checkpoints take up to {size(needed)}, {folder} has {size(free)} free; keep fewer, "
            "use another run_dir, or checkpoint.every=0"
        )
        yield ConfigIssue("checkpoint.keep_last", message, config.checkpoint.keep_last)
