"""Rules between values of a configuration that can be checked without torch.

All rules are checked, even if some are violated. ``preflight`` checks rules that need the model or
the data.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from axonlaunch.config.axes import degrees_of, divisor
from axonlaunch.config.consistency.degree_rules import (
    broken_rounds,
    broken_world_degrees,
    degree_issues,
    legal_micro_batch_sizes,
)
from axonlaunch.config.consistency.layout import (
    data_parallel,
    data_parallel_facts,
    model_ranks,
    nodes,
    num_ranks,
    replicas,
)
from axonlaunch.config.consistency.loss_rules import loss_problems
from axonlaunch.config.consistency.product_rules import rounding_problems
from axonlaunch.config.consistency.run_name import run_name_issues
from axonlaunch.config.consistency.run_precision import precision_of, with_precision
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.optimization.schedules import ConstantConfig, WSDConfig
from axonlaunch.config.options.data import DATASETS, SyntheticTokensConfig
from axonlaunch.config.options.data_parallel import DATA_PARALLEL, DEFAULT
from axonlaunch.config.options.loggers import LOGGERS
from axonlaunch.config.options.recording import ProfileConfig
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.problems.errors import ConfigIssue, divisor_of, one_of
from axonlaunch.config.schema import GROUPS, RunConfig
from axonlaunch.config.values.hub_reference import why_no_repo
from axonlaunch.config.values.intervals import epochs_of
from axonlaunch.config.values.optional_keys import packing_of
from axonlaunch.config.values.plain_values import with_values
from axonlaunch.config.values.url import is_url
from axonlaunch.system.node import host
from axonlaunch.system.storage.files import why_no_folder

_FULL_STEPS = 16
"""Largest number of full traces; each takes more than 10 GB for a billion parameters."""
_NODES = re.compile(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?")
_SIZES = 8
"""Number of problems after which no further numbers of nodes are checked."""


def find_rule_violations(config: RunConfig) -> list[ConfigIssue]:
    """Return all problems of a typed configuration that can be found without torch."""
    if not _NODES.fullmatch(str(config.launch.nnodes)) or nodes(config)[0] > nodes(config)[1]:
        message = "expected a number of nodes, or a minimum and a maximum, as in 2:4"
        return [ConfigIssue("launch.nnodes", message, config.launch.nnodes)]
    config = with_precision(config)
    problems = [
        *run_name_issues(config),
        *_unused_settings(config),
        *_parameters_in_16_bits(config),
        *_masters(config),
        *_update_in_backward(config),
        *loss_problems(config),
        *rounding_problems(config),
        *_compile_mode(config),
        *_attention_kernel(config),
        *_averaged_parameters(config),
        *_no_replicas(config),
        *degree_issues(config),
        *_length(config),
        *_intervals(config),
        *_schedule(config),
        *_extras(config),
        *_loggers(config),
        *_resume(config),
        *_tokenizer(config),
        *_saving(config),
        *_device(config),
        *_threads(config),
        *_node_count(config),
        *_profile(config),
        *_trace(config),
    ]
    if config.launch.nproc != "auto":
        problems += broken_sizes(config)
    return problems


def broken_sizes(config: RunConfig) -> list[ConfigIssue]:
    """Return the first problems for each number of nodes that the run may have."""
    assert config.launch.nproc != "auto"
    least, most = nodes(config)
    if least == most:
        return broken_world_rules(config, world_size=num_ranks(config))
    violations: list[ConfigIssue] = []
    for count in range(least, most + 1):
        size = config.launch.nproc * count
        resized = with_values(config, {"launch.nnodes": count})
        problems = broken_world_rules(resized, world_size=size)
        prefix = f"with {count} node{'s' if count > 1 else ''}: "
        violations += [dataclasses.replace(p, message=prefix + p.message) for p in problems]
        if len(violations) >= _SIZES:
            break
    return violations


def broken_world_rules(config: RunConfig, *, world_size: int) -> list[ConfigIssue]:
    """Return the problems of a typed tree for a number of ranks."""
    if problems := broken_world_degrees(config, world_size=world_size):
        return problems
    return [
        *_single(config, world_size),
        *_replicas(config, world_size),
        *_batch(config, world_size),
        *_update_of_replicas(config, world_size),
        *_profiled_ranks(config, world_size),
    ]


def _unused_settings(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield settings of data-parallel variants that are not selected; they would have no effect."""
    name, chosen = config.strategy.data_parallel or DEFAULT, data_parallel_facts(config.strategy)
    sections: dict[str, str] = {}
    for engine, facts in DATA_PARALLEL.known_facts().items():
        if facts.section:
            sections.setdefault(facts.section, engine)
    for section, engine in sections.items():
        if chosen.section == section:
            continue
        section_config = getattr(config.strategy, section)
        defaults = type(section_config)()
        for field in dataclasses.fields(section_config):
            value = getattr(section_config, field.name)
            if value != getattr(defaults, field.name):
                use = f"strategy.data_parallel={engine}"
                message = f"data_parallel is {name}; use {use} or remove this setting"
                yield ConfigIssue(f"strategy.{section}.{field.name}", message, value)


def _parameters_in_16_bits(config: RunConfig) -> Iterator[ConfigIssue]:
    """Require the precision of weights in 16 bits, which are used without conversion."""
    precision = precision_of(config)
    stored = precision.parameters
    if stored.is_low and precision.compute != stored:
        message = (
            f"weights in {stored.name} compute in {stored.name}, not in {precision.name}; "
            f"use {stored.name}"
        )
        yield ConfigIssue("train.precision", message, precision.name)


def _masters(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield masters that nothing needs or that a layout can't keep, and missing masters."""
    precision, name = precision_of(config), config.strategy.data_parallel
    stored, masters = precision.parameters, precision.masters
    is_trained_in_16_bits = stored.is_low and config.adapter is None
    if masters is not None:
        message = ""
        if not stored.is_low:
            message = f"weights are in {stored.name}; use train.param_dtype=bf16, or null"
        elif config.adapter is not None:
            message = "only the adapter is trained, and it is in fp32; use null"
        elif not data_parallel_facts(config.strategy).is_exact:
            message = f"strategy.data_parallel={name} averages weights, not masters; use null"
        if message:
            yield ConfigIssue("optimizer.master_weights", message, masters.name)
    elif precision.needs_loss_scale and is_trained_in_16_bits:
        message = (
            f"small updates of weights in {stored.name} are lost; add "
            "optimizer.master_weights=fp32, or use fp32"
        )
        yield ConfigIssue("train.param_dtype", message, stored.name)
    if precision.gradients == stored:
        return
    pipeline = config.strategy.pipeline
    is_pipelined = (
        pipeline.degree > 1 and not data_parallel_facts(config.strategy).shards_parameters
    )
    message = ""
    if config.adapter is not None:
        message = "only the adapter is trained, and its gradients are in fp32; use parameter"
    elif masters is None:
        message = (
            "is for the update of masters; add optimizer.master_weights=fp32, or use parameter"
        )
    elif pipeline.degree > 1 and not is_pipelined and precision.reduce.is_low:
        message = (
            f"torch adds up those of a pipeline with {name} in {precision.reduce.name}; use "
            "strategy.reduce_dtype=fp32, or parameter"
        )
    elif is_pipelined and SCHEDULES[pipeline.schedule].separate_weight_grad:
        message = (
            f"torch adds up those of {pipeline.schedule} as they are; use 1f1b, fsdp or parameter"
        )
    if message:
        yield ConfigIssue("train.grad_dtype", message, config.train.grad_dtype)


def _update_in_backward(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield settings with which parameters can't be updated before backward ends."""
    train, strategy, precision = config.train, config.strategy, precision_of(config)
    if not train.optimizer_in_backward:
        return
    key = "train.optimizer_in_backward"
    if train.grad_clip is not None:
        message = f"{key} updates before the norm of all gradients is known; use null"
        yield ConfigIssue("train.grad_clip", message, train.grad_clip)
    if precision.needs_loss_scale:
        message = (
            "fp16 skips an update if any gradient overflows, which is known after backward; use "
            "train.precision=bf16, or false"
        )
        yield ConfigIssue(key, message, True)
    if strategy.pipeline.degree > 1:
        message = (
            "a pipeline adds up the gradients of micro-batches, so all of them exist; use "
            "strategy.pipeline.degree=1, or false"
        )
        yield ConfigIssue(key, message, True)
    if strategy.data_parallel is not None:
        yield from _update_of_averages(strategy.data_parallel)
    offload = strategy.fsdp.cpu_offload
    if data_parallel_facts(strategy).shards_parameters and offload not in ("none", "full"):
        message = f"{key} updates where the parameters are; use none or full"
        yield ConfigIssue("strategy.fsdp.cpu_offload", message, offload)
    if train.trace.steps:
        message = f"{key} frees gradients before they can be traced; use [], or false there"
        yield ConfigIssue("train.trace.steps", message, train.trace.steps)


def _update_of_replicas(config: RunConfig, world_size: int) -> Iterator[ConfigIssue]:
    """Yield layouts whose gradients are averaged or added up after they were computed."""
    train, key = config.train, "train.optimizer_in_backward"
    if not train.optimizer_in_backward:
        return
    if config.strategy.data_parallel is None:
        yield from _update_of_averages(data_parallel(config.strategy, world_size=world_size))
    micro = train.micro_batch_size
    share = train.global_batch_size // (world_size // model_ranks(config.strategy))
    if config.strategy.pipeline.degree == 1 and micro != "auto" and micro < share:
        message = (
            f"gradients of {share // micro} micro-batches are added up, so all of them exist; use "
            f"train.micro_batch_size={share}, or false"
        )
        yield ConfigIssue(key, message, True)


def _update_of_averages(data_parallel: str) -> Iterator[ConfigIssue]:
    """Yield a problem if a variant of data parallelism averages gradients after backward."""
    facts = DATA_PARALLEL.facts(data_parallel)
    if facts.averages != "nothing" and not facts.shards_parameters:
        message = (
            f"strategy.data_parallel={data_parallel} averages gradients in buckets when all of "
            "them are complete; use fsdp, or false"
        )
        yield ConfigIssue("train.optimizer_in_backward", message, True)


def _compile_mode(config: RunConfig) -> Iterator[ConfigIssue]:
    mode = config.train.compile_mode
    if mode != "default" and not config.train.compile:
        message = "nothing is compiled; add train.compile=true, or remove this setting"
        yield ConfigIssue("train.compile_mode", message, mode)


def _attention_kernel(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield unsupported uses of an attention kernel, which torch would report in the first step."""
    kernel = config.train.attention_kernel
    if kernel == "auto":
        return
    message = ""
    if divisor(degrees_of(config.strategy), "sequences") > 1:
        message = "ring attention uses its own kernel; use auto"
    elif kernel != "efficient" and not PRECISIONS[config.train.precision].compute.is_low:
        message = "supports only bf16 and fp16; use efficient, or train.precision=bf16"
    elif kernel == "flash" and packing_of(config.data) != "none":
        message = "supports no mask, which packed documents need; use cudnn or efficient"
    if message:
        yield ConfigIssue("train.attention_kernel", message, kernel)


def _averaged_parameters(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield fp16 for variants that average parameters: each rank would need its own loss scale."""
    name, precision = config.strategy.data_parallel, config.train.precision
    needs_scale = PRECISIONS[precision].needs_loss_scale
    if not data_parallel_facts(config.strategy).is_exact and needs_scale:
        message = f"ranks of {name} have different gradients, but only one loss scale; use bf16"
        yield ConfigIssue("train.precision", message, precision)


def _single(config: RunConfig, world_size: int) -> Iterator[ConfigIssue]:
    needed = model_ranks(config.strategy)
    is_single = data_parallel_facts(config.strategy).averages == "nothing"
    if is_single and world_size > needed:
        count = "1 rank" if needed == 1 else f"{needed} ranks"
        copies = f"{world_size} ranks would train independent copies"
        message = f"{copies}; use strategy.data_parallel=ddp or {count}"
        yield ConfigIssue("launch.nproc", message, world_size)


def _no_replicas(config: RunConfig) -> Iterator[ConfigIssue]:
    fsdp = config.strategy.fsdp
    is_sharded = data_parallel_facts(config.strategy).shards_parameters
    if not is_sharded or fsdp.sharding == "hybrid_shard":
        return
    if fsdp.replicate != "auto":
        message = f"sharding is {fsdp.sharding}; use hybrid_shard, or remove this setting"
        yield ConfigIssue("strategy.fsdp.replicate", message, fsdp.replicate)


def _replicas(config: RunConfig, world_size: int) -> Iterator[ConfigIssue]:
    ranks = world_size // model_ranks(config.strategy)
    if ranks % replicas(config, world_size=world_size):
        message = f"{ranks} ranks are not divisible by it; use {divisor_of(ranks)}"
        yield ConfigIssue("strategy.fsdp.replicate", message, config.strategy.fsdp.replicate)


def _batch(config: RunConfig, world_size: int) -> Iterator[ConfigIssue]:
    train = config.train
    ranks = world_size // model_ranks(config.strategy)
    if ranks % replicas(config, world_size=world_size):
        return  # reported already
    if train.global_batch_size % ranks:
        nearest = max(1, round(train.global_batch_size / ranks)) * ranks
        counts = divisor_of(train.global_batch_size)
        kind = "ranks" if ranks == world_size else "data-parallel ranks"
        message = f"must be divisible by {ranks} {kind}; try {nearest}, or {counts} {kind}"
        yield ConfigIssue("train.global_batch_size", message, train.global_batch_size)
        return
    share = train.global_batch_size // ranks
    micro = train.micro_batch_size
    if micro != "auto" and share % micro:
        legal = legal_micro_batch_sizes(config, share=share)
        use = one_of(legal) if config.strategy.pipeline.degree > 1 and legal else divisor_of(share)
        message = f"a rank's share of the global batch is {share} samples; use {use}"
        yield ConfigIssue("train.micro_batch_size", message, micro)
        return
    yield from broken_rounds(config, world_size=world_size)


def _length(config: RunConfig) -> Iterator[ConfigIssue]:
    train = config.train
    if train.epochs is not None and train.steps != "auto":
        message = f"train.steps is {train.steps}; use one of them"
        yield ConfigIssue("train.epochs", message, train.epochs)
    if train.epochs is None and train.steps == "auto":
        message = "is computed from train.epochs, which is null; set one of them"
        yield ConfigIssue("train.steps", message, "auto")
    if train.early_stop is not None and not (train.eval_every and train.eval_batches):
        key = "eval_every" if train.eval_batches else "eval_batches"
        message = f"nothing is evaluated before the end: train.{key} is 0; use null, or evaluate"
        yield ConfigIssue("train.early_stop", message, train.early_stop)


def _intervals(config: RunConfig) -> Iterator[ConfigIssue]:
    every, last = config.checkpoint.every, config.train.steps
    for key, interval in {
        "train.eval_every": config.train.eval_every,
        "checkpoint.every": every,
    }.items():
        if isinstance(interval, str) and epochs_of(interval) is None:
            message = "expected a number of steps, or of epochs above 0, as in '0.5 epoch'"
            yield ConfigIssue(key, message, interval)
    if not isinstance(every, list):
        return
    if not every or min(every) < 1 or len(set(every)) < len(every):
        message = "expected steps from 1, each once, as in [100,500]"
        yield ConfigIssue("checkpoint.every", message, every)
    elif last != "auto" and max(every) > last:
        message = f"train.steps is {last}, so there is no step {max(every)}; remove it"
        yield ConfigIssue("checkpoint.every", message, every)


def _schedule(config: RunConfig) -> Iterator[ConfigIssue]:
    steps, schedule = config.train.steps, config.scheduler
    if steps == "auto" or not isinstance(schedule, ConstantConfig):
        return  # known once the data is read; checked again then
    warmup = schedule.warmup(steps)
    if schedule.warmup_steps != "auto" and 0 < steps <= warmup:
        message = f"train.steps is {steps}; use fewer, or auto, or train longer"
        yield ConfigIssue("scheduler.warmup_steps", message, warmup)
        return
    if isinstance(schedule, WSDConfig) and 0 < steps < warmup + schedule.decay(steps):
        yield _long_decay(schedule, steps)


def _long_decay(schedule: WSDConfig, steps: int) -> ConfigIssue:
    """Return the problem that warm-up and decay exceed the run.

    The decay is reported if it is set and can be shorter, else the warm-up.
    """
    warmup, decay = schedule.warmup(steps), schedule.decay(steps)
    exceeds = f"with {warmup} steps of warm-up it exceeds train.steps={steps}; use"
    ratio = math.floor(100 * (steps - warmup) / steps) / 100
    if schedule.decay_steps and warmup < steps:
        message = f"{exceeds} {steps - warmup} or less"
        return ConfigIssue("scheduler.decay_steps", message, schedule.decay_steps)
    if schedule.decay_ratio is not None and ratio > 0:
        return ConfigIssue(
            "scheduler.decay_ratio", f"{exceeds} {ratio} or less", schedule.decay_ratio
        )
    exceeds = f"with {decay} steps of decay it exceeds train.steps={steps}; use"
    left = max(0, steps - decay)
    if schedule.warmup_ratio is None:
        return ConfigIssue("scheduler.warmup_steps", f"{exceeds} {left} or less", warmup)
    message = f"{exceeds} {math.floor(100 * left / steps) / 100} or less"
    return ConfigIssue("scheduler.warmup_ratio", message, schedule.warmup_ratio)


def _extras(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield packages that the selected options require and that are not installed."""
    chosen = [
        (f"{group}.name", getattr(config, group).name, registry)
        for group, registry in GROUPS.items()
        if registry is not None
    ]
    chosen += [("loggers", logger.name, LOGGERS) for logger in config.loggers]
    for key, name, registry in chosen:
        needs = registry.entry(name).needs if registry.is_registered(name) else None
        if needs is not None and needs.is_missing:
            yield ConfigIssue(key, str(needs), name)


def _loggers(config: RunConfig) -> Iterator[ConfigIssue]:
    names = [logger.name for logger in config.loggers if logger.name != "custom"]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ConfigIssue("loggers", f"{name} is listed {names.count(name)} times; list it once")


def _tokenizer(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a tokenizer for data that uses none; it would have no effect."""
    name, tokenizer = config.data.name, config.tokenizer
    facts = DATASETS.facts(name) if DATASETS.is_registered(name) else None
    if tokenizer.new_tokens() and isinstance(config.data, SyntheticTokensConfig):
        return  # an estimate, whose model has a row for each of them
    key, default = "name", "auto"
    if tokenizer.path is not None:
        key, default = "path", "null"
    elif tokenizer.new_tokens():
        key, default = ("add_tokens", "[]") if tokenizer.add_tokens else ("special", "{}")
    is_set = tokenizer.name == "train" or key != "name"
    if is_set and not (facts and facts.takes_tokenizer):
        takers = [
            dataset for dataset, facts in DATASETS.known_facts().items() if facts.takes_tokenizer
        ]
        message = f"data={name} takes no tokenizer; use data={one_of(takers)}, or {default}"
        yield ConfigIssue(f"tokenizer.{key}", message, getattr(tokenizer, key))


def _saving(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.checkpoint.async_save and config.launch.backend == "mock":
        message = (
            "launch.backend=mock runs one rank at a time, so it can't save in the background; "
            "use false or launch.backend=gloo"
        )
        yield ConfigIssue("checkpoint.async_save", message, True)
    if config.checkpoint.keep_best and not config.train.eval_batches:
        message = "nothing is evaluated: train.eval_batches is 0; use 0, or evaluate"
        yield ConfigIssue("checkpoint.keep_best", message, config.checkpoint.keep_best)
    elif config.checkpoint.keep_best and not config.train.eval_every:
        message = "nothing is evaluated before the end: train.eval_every is 0; use 0, or evaluate"
        yield ConfigIssue("checkpoint.keep_best", message, config.checkpoint.keep_best)
    elif config.checkpoint.keep_best and not config.checkpoint.every:
        message = "no checkpoint is saved; use 0, or set checkpoint.every"
        yield ConfigIssue("checkpoint.keep_best", message, config.checkpoint.keep_best)
    push = config.checkpoint.push
    if push is not None and (reason := why_no_repo(push)) is not None:
        yield ConfigIssue("checkpoint.push", reason, push)
    elif push is not None and not config.checkpoint.every:
        message = "no checkpoint is saved that could be uploaded; set checkpoint.every"
        yield ConfigIssue("checkpoint.push", message, push)
    if push is None and config.checkpoint.push_private:
        message = "nothing is uploaded; write checkpoint.push=ORG/NAME, or use false"
        yield ConfigIssue("checkpoint.push_private", message, True)


def _trace(config: RunConfig) -> Iterator[ConfigIssue]:
    steps, last = config.train.trace.steps, config.train.steps
    if last == "auto":  # known once the data is read
        last = 10**9
    if len(set(steps)) < len(steps) or any(not 0 <= step < last for step in steps):
        message = f"expected steps from 0, the first, to {last - 1}, each once, as [0]"
        yield ConfigIssue("train.trace.steps", message, steps)
    if config.train.trace.tensors == "full" and len(steps) > _FULL_STEPS:
        message = (
            f"all elements of {len(steps)} steps would be written; list at most {_FULL_STEPS}, "
            "or use train.trace.tensors=norms"
        )
        yield ConfigIssue("train.trace.steps", message, steps)


def _device(config: RunConfig) -> Iterator[ConfigIssue]:
    launch, strategy = config.launch, config.strategy
    if launch.device == "cpu" and launch.backend == "nccl":
        message = "NCCL needs accelerators; use auto, or launch.backend=gloo"
        yield ConfigIssue("launch.device", message, launch.device)
    if launch.device != "cuda" or launch.backend != "gloo":
        return
    degrees = degrees_of(strategy).values()
    facts = data_parallel_facts(strategy)
    shards = facts.shards_parameters or facts.shards_gradients or facts.shards_optimizer
    if max(degrees) > 1 or shards:
        message = (
            "gloo can reduce and broadcast GPU tensors, but not gather, scatter or send them, "
            "which this strategy needs; use mock"
        )
        yield ConfigIssue("launch.backend", message, launch.backend)


def _threads(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem with the environment variable that ``launch.threads=auto`` reads."""
    if config.launch.threads != "auto":
        return
    try:
        host.requested_threads()
    except ValueError as error:
        message = f"{error}; correct or unset this variable, or set launch.threads"
        yield ConfigIssue(host.OMP_NUM_THREADS, message, os.environ[host.OMP_NUM_THREADS])


def _profile(config: RunConfig) -> Iterator[ConfigIssue]:
    profile, steps = config.train.profile, config.train.profile.steps
    # With train.epochs the number of steps is known once the data is read.
    last = math.inf if config.train.steps == "auto" else config.train.steps
    if not steps and profile != ProfileConfig():
        message = "no step is profiled; write the first and the last, as [10,13]"
        yield ConfigIssue("train.profile.steps", message, steps)
    elif steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= last):
        until = "the last step" if last == math.inf else last
        example = f"[{min(2, last)},{min(5, last)}]"
        message = f"expected the first and the last of steps 1 to {until}, as {example}"
        yield ConfigIssue("train.profile.steps", message, steps)
    if not profile.ranks or len(set(profile.ranks)) < len(profile.ranks):
        message = "expected ranks, each once, as [0]"
        yield ConfigIssue("train.profile.ranks", message, profile.ranks)
    elif steps and config.launch.backend == "mock" and len(profile.ranks) > 1:
        message = (
            "launch.backend=mock runs ranks as threads of one process, and only one of them can be "
            "profiled; use [0] or launch.backend=gloo"
        )
        yield ConfigIssue("train.profile.ranks", message, profile.ranks)


def _profiled_ranks(config: RunConfig, world_size: int) -> Iterator[ConfigIssue]:
    ranks = config.train.profile.ranks
    if not all(0 <= rank < world_size for rank in ranks):
        message = f"the world has ranks 0 to {world_size - 1}; use those"
        yield ConfigIssue("train.profile.ranks", message, ranks)


def _node_count(config: RunConfig) -> Iterator[ConfigIssue]:
    most = nodes(config)[1]
    if config.launch.name == "local" and most > 1:
        message = "launch.name=local is this node only; use 1, or launch=auto"
        yield ConfigIssue("launch.nnodes", message, config.launch.nnodes)
    if config.launch.max_restarts and not config.checkpoint.every:
        message = "no checkpoint is saved to restart from; use 0, or set checkpoint.every"
        yield ConfigIssue("launch.max_restarts", message, config.launch.max_restarts)


def _resume(config: RunConfig) -> Iterator[ConfigIssue]:
    resume = config.checkpoint.resume
    if config.checkpoint.path == "":
        yield ConfigIssue("checkpoint.path", "is empty; write a folder or a URL, or null", "")
    if resume in ("auto", "never") or is_url(resume):  # URLs are checked later
        return
    if not Path(resume).is_dir():
        use = "give a run folder, a checkpoint, auto or never"
        message = f"{why_no_folder(Path(resume))}; {use}"
        yield ConfigIssue("checkpoint.resume", message, resume)
