"""Runs all checks of a configuration that need torch, the model or the data, but no rank.

The checks run in a separate process before any rank starts. All problems are collected and reported
together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from torch import nn

from axonlaunch.checkpoint.exchange.hub_push import push_problems, pushed_adapter_problems
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.axes import PRINTED
from axonlaunch.config.code.callback import find_class_problem
from axonlaunch.config.code.plugins import import_callable, import_plugins
from axonlaunch.config.consistency.layout import Layout, num_ranks, resolved, with_backend
from axonlaunch.config.consistency.rules import find_rule_violations
from axonlaunch.config.consistency.run_precision import with_precision
from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.options.loggers import CustomLoggerConfig
from axonlaunch.config.options.training_hooks import CustomCallbackConfig
from axonlaunch.config.problems.errors import gathering
from axonlaunch.config.values.url import is_url
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.hub.repository import Downloading
from axonlaunch.data.selection.pinning import fetch_data
from axonlaunch.data.shards.encoding import OnProgress, Tokenizing
from axonlaunch.data.texts.untokenized import Untokenized
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.parameter_facts import TrainingShares, stored_bytes
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.specs.trainable import frozen_problems
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.preflight.adapter import find_adapter_problems, with_adapter_settings
from axonlaunch.preflight.checkpoint import (
    changed_data_problems,
    checkpoint_problems,
    epochs_problems,
    first_row_at,
    resumed_settings,
    with_resumed_precision,
)
from axonlaunch.preflight.custom_data import custom_data_problems, needs_custom_loss
from axonlaunch.preflight.dataset import (
    dataset_without_tokenizing,
    make_dataset,
    model_data_mismatches,
    packing_problems,
    sample_problems,
    with_hub_data,
    with_packing,
    with_steps,
    with_template_date,
    with_vocabulary,
)
from axonlaunch.preflight.devices import (
    accelerators,
    device_problems,
    memory_of_a_rank,
    with_device_precision,
)
from axonlaunch.preflight.model_outputs import (
    head_problems,
    loss_term_problems,
    metric_problems,
    output_problems,
    with_accuracy,
)
from axonlaunch.preflight.module_trace import trace_problems
from axonlaunch.preflight.optimizer import optimizer_problems, rate_problems
from axonlaunch.preflight.parallelism import (
    AXIS_PROBLEMS,
    balance_problems,
    expert_problems,
    first_four,
    product_problems,
    sharding_problems,
    statistics_problems,
)
from axonlaunch.preflight.paths import with_absolute_paths
from axonlaunch.system.storage.disk import free_bytes
from axonlaunch.system.text.formatting import size

OnState = Callable[[Tokenizing | Downloading], None]
"""Receives the progress of the checks that may take minutes."""


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
) -> Generator[Tokenizing | Downloading, None, RunConfig]:
    """Resolve and check as ``resolve`` does; yield the progress of downloads and tokenization.

    Raises:
        ConfigError: The configuration has problems; all are reported together.
    """
    devices = accelerators(config) if devices is None else devices
    states: SimpleQueue[Tokenizing | Downloading | None] = SimpleQueue()
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
    config: RunConfig, *, devices: int, here: bool, report: OnState = lambda state: None
) -> RunConfig:
    import_plugins(config.plugins)  # the parent has imported them, but in another process
    config = resolved(config, accelerators=devices)
    if here:
        config = with_backend(config, accelerators=devices)
        config = with_device_precision(with_resumed_precision(config))
    config = _with_model_and_data(with_precision(config), here=here, report=report)
    if here:
        with suppress(ConfigError):  # the check of the data reports it
            config = with_template_date(config, resumed=resumed_settings)
    problems, dataset = _examine(config, devices=devices if here else None, report=report)
    if here and dataset is not None and not problems:
        epochs = config.train.epochs
        config = with_steps(config, dataset, first_row_at=first_row_at(config, dataset))
        problems = find_rule_violations(config)  # again, because the number of steps is now known
        problems += epochs_problems(config, epochs=epochs)
        config = with_accuracy(config, dataset)
        problems += metric_problems(config, dataset)
        problems += rate_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def _with_model_and_data(
    config: RunConfig, *, here: bool, report: OnState = lambda state: None
) -> RunConfig:
    """Fetch the model and the data, and resolve the settings that depend on them.

    Raises:
        ConfigError: The model or the data can't be found, downloaded or read.
    """
    problems = fetch_model(config, here=here)
    with gathering(problems):
        config = with_hub_data(config, here=here, resumed=resumed_settings, report=report)
    if problems:
        raise ConfigError(problems)
    return with_packing(with_vocabulary(with_adapter_settings(with_absolute_paths(config))))


def check_model_and_data(config: RunConfig) -> None:
    """Check the model, the data and their match, whose problems no other layout solves.

    Raises:
        ConfigError: The model and the data have problems; all are reported together.
    """
    if problems := _ModelAndData.of(_with_model_and_data(config, here=False)).problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class _ModelAndData:
    """The model and the dataset of a run.

    Attributes:
        spec: Specification of the model; None if there is none.
        model: The model without storage; None if it can't be trained.
        dataset: The dataset, or a description of text to tokenize; None if it can't be built.
        problems: Problems of each, and of their match.
    """

    spec: ModelSpec | None
    model: nn.Module | None
    dataset: Any
    problems: list[ConfigIssue]

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build both, and find their problems."""
        dataset, problems = dataset_without_tokenizing(config)
        spec, model, issues = _model(config)
        if any(issue.key == "model.path" for issue in issues):
            same = ("tokenizer.path", config.model_path)  # the folder has neither, for one reason
            problems = [issue for issue in problems if (issue.key, issue.value) != same]
        problems = [*problems, *issues]
        if spec is not None:
            problems += loss_term_problems(config.train, spec)
        if spec is not None and dataset is not None:
            problems += _mismatches(config, spec, model, dataset)
        return cls(spec, model, dataset, problems)


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
    # Check the rules again after resolving, because each rank checks its configuration too.
    problems = find_rule_violations(config)
    if devices is not None:
        problems += device_problems(config, devices)
        problems += _custom_parts(config)
        problems += source_of(config).device_problems(config.launch.device)
        if config.checkpoint.push is not None and config.launch.node_rank in (0, "auto"):
            problems += push_problems(config.checkpoint.push)
    built = _ModelAndData.of(config)
    spec, model, dataset = built.spec, built.model, built.dataset
    problems += built.problems
    if here and dataset is not None and not isinstance(dataset, Untokenized):
        problems += sample_problems(config, dataset)
    if model is not None and spec is not None:
        problems += _layout_problems(config, spec, model)
        problems += packing_problems(config, spec, dataset)
        problems += pushed_adapter_problems(config, model)
    issues = [] if spec is None or model is None else optimizer_problems(config, spec, model)
    problems += issues
    if here and model is not None and not issues:
        problems += _memory(config, model, Layout.of(config, world_size=num_ranks(config)))
        problems += _disk(config, model)
        if dataset is not None and config.train.trace.tensors == "full":
            problems += trace_problems(config, model, dataset)
        problems += checkpoint_problems(config, model)
    if here and isinstance(dataset, Untokenized) and not problems:
        dataset, problems = make_dataset(config, report)
        problems += [] if dataset is None else sample_problems(config, dataset)
    if here and dataset is not None and not isinstance(dataset, Untokenized) and not problems:
        problems += changed_data_problems(config, dataset)
    return problems, None if isinstance(dataset, Untokenized) else dataset


def _mismatches(
    config: RunConfig, spec: ModelSpec, model: nn.Module | None, dataset: Dataset
) -> list[ConfigIssue]:
    """Return the problems of a model with the data: its inputs, its outputs and the loss."""
    source = source_of(config)
    mismatches = list(model_data_mismatches(config, spec, dataset, model))
    if needs_custom_loss(dataset) or config.train.loss is not None:
        mismatches = list(custom_data_problems(config, model, dataset))
    elif not mismatches and model is not None and source.code != "included":
        is_library = source.code == "library"  # its embedding and head can grow
        larger = source.setting("vocab_size", dataset.num_classes) if is_library else ""
        problems = output_problems(model, spec, dataset, setting=larger)
        mismatches = [source.problem(each.message) for each in problems]
    if not mismatches and model is not None and config.train.defers_head:
        return list(head_problems(model, spec, dataset, train=config.train))
    return mismatches


def _layout_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield the problems of a model with the layout of the run."""
    yield from sharding_problems(config, spec, model)
    yield from statistics_problems(config, model)
    for axis in PRINTED:
        yield from AXIS_PROBLEMS[axis.name](config, spec, model)
    yield from expert_problems(config, spec, model)
    yield from balance_problems(config, spec, model)
    yield from product_problems(config, spec, model)


def fetch_model_and_data(config: RunConfig) -> None:
    """Download the model and the data of a run to this node.

    Args:
        config: Complete configuration, as written to the run folder.

    Raises:
        ConfigError: The model or the data can't be downloaded.
    """
    problems = fetch_model(config, here=True)
    if isinstance(config.data, TextRowsConfig):
        with gathering(problems):
            fetch_data(config.data)
    if problems:
        raise ConfigError(problems)


def fetch_model(config: RunConfig, *, here: bool) -> list[ConfigIssue]:
    """Download the files of the model that this node lacks, once for all ranks."""
    try:
        source_of(config).fetch(weights=here)
    except ConfigError as error:
        return error.problems
    return []


def _custom_parts(config: RunConfig) -> Iterator[ConfigIssue]:
    """Import custom loggers and callbacks. They are built later, in ranks."""
    for key, parts in {"loggers": config.loggers, "callbacks": config.callbacks}.items():
        for number, part in enumerate(parts):
            if isinstance(part, CustomLoggerConfig | CustomCallbackConfig):
                target_key = f"{key}[{number}].target"
                try:
                    builder = import_callable(target_key, part.target, part.arguments)
                except ConfigError as error:
                    yield from error.problems
                    continue
                if key == "callbacks" and (reason := find_class_problem(builder)):
                    yield ConfigIssue(target_key, reason, part.target)


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


def _memory(config: RunConfig, model: nn.Module, layout: Layout) -> Iterator[ConfigIssue]:
    """Yield a problem if parameters, gradients and optimizer states exceed the memory of a rank.

    Activations are not counted, nor gradients that are freed in backward.
    """
    count = sum(logical_numel(p) for p in model.parameters())
    stored = stored_bytes(model, element=config.train.parameter_bytes)
    shares = TrainingShares.of(config)
    # An update in backward frees each gradient before the next one exists.
    gradients = 0.0 if config.train.optimizer_in_backward else shares.gradients
    per_byte = (
        1 / layout.parameter_shards
        + gradients / layout.gradient_shards
        + shares.states / layout.optimizer_shards
    )
    per_rank = int(stored // layout.parameter_divisor * per_byte)
    memory, owner = min(_memory_limits(config))
    offload = config.strategy.fsdp.cpu_offload
    if per_rank > memory and offload == "none":
        held = "gradients and optimizer states" if gradients else "optimizer states"
        message = (
            f"{count / 1e9:.3g}B parameters with {held} take "
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
    shares = TrainingShares.of(config)
    saved = 1 if config.saves_frozen else shares.gradients
    stored = stored_bytes(model, element=config.train.parameter_bytes)
    per_checkpoint = stored * (saved + shares.states)
    needed = int(per_checkpoint) * _num_checkpoints(config)
    path = config.checkpoint.path or config.run_dir
    if is_url(path):  # the free space of remote storage is not known
        return
    folder, free = free_bytes(Path(path if path != "auto" else "runs"))
    if not os.access(folder, os.W_OK):  # the launcher reports a run folder that can't be created
        if config.checkpoint.path is not None:
            yield ConfigIssue("checkpoint.path", f"{folder} can't be written to; use another", path)
    elif needed > free:
        message = (
            f"checkpoints take up to {size(needed)}, but {folder} has {size(free)} free; keep "
            "fewer, use another run_dir, or checkpoint.every=0"
        )
        name = "keep_every_n_steps" if config.checkpoint.keep_every_n_steps else "keep_last"
        name = "every" if isinstance(config.checkpoint.every, list) else name
        yield ConfigIssue(f"checkpoint.{name}", message, getattr(config.checkpoint, name))


def _num_checkpoints(config: RunConfig) -> int:
    """Return the maximum number of checkpoints on the disk, with the one that is being written."""
    checkpoint, steps = config.checkpoint, config.train.steps
    if isinstance(checkpoint.every, list):
        return len({*checkpoint.every, steps})  # all are kept, and the last step's
    num_checkpoints = checkpoint.keep_last + checkpoint.keep_best + 1
    if checkpoint.keep_every_n_steps and steps != "auto" and isinstance(checkpoint.every, int):
        num_checkpoints += steps // math.lcm(checkpoint.every, checkpoint.keep_every_n_steps)
    return num_checkpoints
