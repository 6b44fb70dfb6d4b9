"""What is wrong with what a run is to start from, reported before a rank starts.

Sizes, names and shapes are looked at; contents are read, and their checksums held, by the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from axonlaunch.checkpoint import fallback, reader, step_folders, weights
from axonlaunch.checkpoint.base_weights import find_base_problems
from axonlaunch.checkpoint.manifest import Checkpoint
from axonlaunch.checkpoint.resume_source import checkpoint_root, resume_of
from axonlaunch.checkpoint.storage import reaching, storage_path
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.data import DATASETS
from axonlaunch.config.optimizer import OPTIMIZERS
from axonlaunch.config.parameter_groups import states_of, with_options
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.describe_rows import describe_rows
from axonlaunch.data.learned_tokenizer import load_or_learn
from axonlaunch.data.origin import Origin, changed_data_issues, find_differences
from axonlaunch.data.tokenizer import FOLDER, load_kept
from axonlaunch.models.build import initial_weights, spec_for
from axonlaunch.models.lora import not_saved
from axonlaunch.models.parameter_facts import parameter_facts
from axonlaunch.system.files import why_no_folder

if TYPE_CHECKING:
    from torch import nn

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By what ``train.param_dtype`` calls them."""


def checkpoint_problems(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield what keeps a run from its checkpoint, or from the weights that it is to start from.

    Args:
        config: The run's.
        model: As it is to be, on ``meta`` or not.
    """
    key, where = "checkpoint.resume", config.checkpoint.resume
    if where in ("auto", "never") and config.checkpoint.path is not None:
        key, where = "checkpoint.path", config.checkpoint.path
    try:
        yield from _resume(config, model)
    except ConfigError as error:
        yield from _explain_unreached(error, key, where)
    yield from _weights(config, model)


def _explain_unreached(error: ConfigError, key: str, where: str) -> Iterator[ConfigIssue]:
    """Yield, as problems of a key, that a place can't be reached."""
    for problem in error.problems:
        yield ConfigIssue(key, problem.message.removeprefix(f"{where}: "), where)


def _weights(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    try:
        named = initial_weights(config.model)
    except ConfigError as error:
        yield from error.problems
        return
    if named is None:
        return
    key, path = named
    if config.checkpoint.resume not in ("auto", "never") and config.saves_frozen:
        if key != "model.weights":
            return  # what describes the model names weights too, which that checkpoint replaces
        message = (
            f"checkpoint.resume={config.checkpoint.resume} brings weights of its own; use null"
        )
        yield ConfigIssue(key, message, path)
        return
    try:
        there = storage_path(path)
        with reaching(there):
            is_folder = there.is_dir()
    except ConfigError as error:
        yield from _explain_unreached(error, key, path)
        return
    if not is_folder:
        use = "give a run, a checkpoint, or a folder of safetensors"
        message = f"{why_no_folder(there)}; {use}"
        yield ConfigIssue(key, message, path)
        return
    try:
        wrong = weights.differences(there, config.model, model)
    except ConfigError as error:
        yield from (ConfigIssue(key, problem.message, path) for problem in error.problems)
    else:
        if wrong:
            message = f"they were saved with a different model: {weights.first(wrong)}"
            yield ConfigIssue(key, message, path)


def _resume(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    resume = resume_of(config)
    if resume == "never":
        yield from _overwritten(config.checkpoint.path)
        return
    folder = _resumed_from(config)
    if folder is None:
        return
    with reaching(folder):
        checkpoint, wrong = fallback.newest_good(folder)
        if wrong and (checkpoint is None or resume != "auto" or not config.checkpoint.fallback):
            yield _corrupt(resume, wrong, checkpoint)
        elif checkpoint is not None:
            yield from _resumable(config, model, checkpoint)
            yield from _other_tokenizer(config, checkpoint.path.parent.parent)
        elif resume != "auto":
            yield ConfigIssue("checkpoint.resume", "there is no complete checkpoint in it", resume)


def _resumed_from(config: RunConfig) -> Path | None:
    """Return the folder whose newest checkpoint a run resumes from, if there is one; None: none."""
    resume = resume_of(config)
    if resume == "never":
        return None
    return checkpoint_root(config) if resume == "auto" else storage_path(resume)


def changed_data_problems(config: RunConfig, dataset: Dataset) -> list[ConfigIssue]:
    """Return how a run's data differs from that of the checkpoint that it resumes from."""
    checkpoint, saved, now = _origins(config, dataset)
    if checkpoint is None or saved is None or config.checkpoint.changed_data == "restart":
        return []
    return changed_data_issues(saved, now, where=checkpoint.path, data=config.data)


def first_row_at(config: RunConfig, dataset: Dataset) -> int:
    """Return how many samples of other data a run saw before the first row of this."""
    checkpoint, saved, now = _origins(config, dataset)
    if checkpoint is None:
        return 0
    is_changed = saved is not None and any(find_differences(saved, now))
    return checkpoint.samples if is_changed else checkpoint.first_row_at


def _origins(
    config: RunConfig, dataset: Dataset
) -> tuple[Checkpoint | None, Origin | None, Origin | None]:
    """Return what a run resumes from, and the descriptions of its rows and of the data's."""
    checkpoint = _newest(config)
    if checkpoint is None or checkpoint.origin is None:
        return checkpoint, None, None
    saved = Origin.from_dict(checkpoint.origin)
    return checkpoint, saved, describe_rows(config, dataset, like=saved)


def _newest(config: RunConfig) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from; None: it begins."""
    if (folder := _resumed_from(config)) is None:
        return None
    with reaching(folder):
        return fallback.newest_good(folder)[0]


def epochs_problems(config: RunConfig, *, epochs: float | None) -> Iterator[ConfigIssue]:
    """Yield that a run has done more steps already than its epochs turned out to be.

    Args:
        config: With the steps that the epochs take.
        epochs: ``train.epochs``, as it was asked for; None: it was not.
    """
    checkpoint = None if epochs is None else _newest(config)
    if checkpoint is not None and checkpoint.step > config.train.num_steps:
        message = (
            f"{checkpoint.path} has done {checkpoint.step} steps already, and this is "
            f"{config.train.num_steps}; use more to train on"
        )
        yield ConfigIssue("train.epochs", message, epochs)


def _other_tokenizer(config: RunConfig, run_dir: Path) -> Iterator[ConfigIssue]:
    """Refuse tokens that mean something else to a model than those that it was trained on."""
    if not DATASETS.facts(config.data.name).takes_tokenizer:
        return
    try:
        before = load_kept(run_dir)
        data: Any = config.data
        now = load_or_learn(config.tokenizer, data, report=lambda state: None)
    except ConfigError:
        return  # the data, which needs it, reports it
    if before is None or before.fingerprint == now.fingerprint:
        return
    if config.tokenizer.name == "train":
        message = (
            "another tokenizer is learned than the run was trained with, as data.files have "
            f"changed; use tokenizer=auto tokenizer.path={run_dir / FOLDER}"
        )
        yield ConfigIssue("tokenizer.name", message, "train")
    else:
        message = f"is not the tokenizer that the run was trained with; use {run_dir / FOLDER}"
        yield ConfigIssue("tokenizer.path", message, config.tokenizer.path)


def _overwritten(path: str | None) -> Iterator[ConfigIssue]:
    """Refuse to start from step 0 where another run keeps its checkpoints."""
    if path is None:
        return
    with reaching(storage_path(path)):
        checkpoint = step_folders.latest(storage_path(path))
    if checkpoint is not None:
        message = (
            f"{checkpoint.path} is there; use another checkpoint.path, or resume from it with auto"
        )
        yield ConfigIssue("checkpoint.resume", message, "never")


def _corrupt(resume: str, wrong: dict[Path, str], checkpoint: Checkpoint | None) -> ConfigIssue:
    """Refuse to resume in silence from an older checkpoint, or from nothing."""
    reasons = "; ".join(f"{path} {reason}" for path, reason in wrong.items())
    return ConfigIssue("checkpoint.resume", f"{reasons}; {fallback.instead(checkpoint)}", resume)


def _resumable(
    config: RunConfig, model: nn.Module, checkpoint: Checkpoint
) -> Iterator[ConfigIssue]:
    """Compare a checkpoint with the run that is to resume from it."""
    resume = config.checkpoint.resume
    if config.train.steps != "auto" and checkpoint.step > config.train.steps:
        message = f"{checkpoint.path} has done {checkpoint.step} already; use more to train on"
        yield ConfigIssue("train.steps", message, config.train.steps)
    if checkpoint.samples != checkpoint.step * config.train.global_batch_size:
        message = (
            f"{checkpoint.path} saw {checkpoint.samples // max(1, checkpoint.step)} samples per "
            "step; keep that, so that no sample is skipped or repeated"
        )
        yield ConfigIssue("train.global_batch_size", message, config.train.global_batch_size)
    if reader.is_of_a_run(checkpoint):
        yield from _other_states(config, checkpoint, model)
        yield from _other_types(config, checkpoint, model)
    else:
        message = (
            f"{checkpoint.path} contains weights only (no optimizer state); "
            f"use never, and model.weights={checkpoint.path}"
        )
        yield ConfigIssue("checkpoint.resume", message, resume)
    yield from find_base_problems(config, checkpoint.path.parent.parent)
    left_out = not_saved(config, model)
    differences = reader.model_differences(checkpoint, model, without=left_out)
    if differences:
        message = (
            f"{checkpoint.path} was saved with a different model: {weights.first(differences)}"
        )
        yield ConfigIssue("checkpoint.resume", message, resume)


def _other_states(
    config: RunConfig, checkpoint: Checkpoint, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Refuse optimizer states that this run's optimizer does not have, or has and lacks here."""
    optimizer, saved = config.optimizer, reader.saved_states(checkpoint)
    facts = parameter_facts(spec_for(config), model)
    wanted = {
        f"{name}.{state}"
        for name, parameter in facts.items()
        for state in states_of(with_options(optimizer, parameter), parameter.shape)
    }
    if saved == wanted:
        return
    kinds, wanted_kinds = _kinds(saved), _kinds(wanted)
    # Of SGD with and without momentum that field is at fault, not the optimizer.
    known = OPTIMIZERS.facts(optimizer.name).states or ()
    depends_on = {state.name: state.absent_at_zero for state in known}
    fields = {depends_on.get(name) for name in kinds ^ wanted_kinds}
    field = fields.pop() if len(fields) == 1 else None
    if field is not None:
        use = "use what it was saved with, above 0" if saved else "use 0, as it was saved with"
        message = f"{checkpoint.path} has {_list_kinds(kinds)}; {use}"
        yield ConfigIssue(f"optimizer.{field}", message, getattr(optimizer, field))
    elif kinds == wanted_kinds:
        other = sorted(saved ^ wanted)[0]
        where = "has" if other in saved else "lacks"
        message = f"{checkpoint.path} was saved with other groups: it {where} {other}; use the same"
        yield ConfigIssue("optimizer.groups", message, getattr(optimizer, "groups", ...))
    else:
        message = (
            f"{checkpoint.path} was saved with a different optimizer; it has {_list_kinds(kinds)}"
        )
        yield ConfigIssue("optimizer.name", message, optimizer.name)


def _other_types(
    config: RunConfig, checkpoint: Checkpoint, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Refuse to take weights, or states, in another type than they were saved in."""
    saved, optimizer = reader.contents(checkpoint), config.optimizer
    dtype = _DTYPES[config.train.param_dtype]
    facts = parameter_facts(spec_for(config), model)
    for name, parameter in model.named_parameters():
        is_kept = dtype is torch.float32 or (config.adapter is not None and parameter.requires_grad)
        own = parameter.dtype if is_kept else dtype
        seen = _dtype(saved.get(f"{reader.MODEL}{name}"))
        if seen is not None and parameter.is_floating_point() and seen != own:
            message = (
                f"{checkpoint.path} has {name} in {_dtype_name(seen)}; use that, or model.weights"
            )
            yield ConfigIssue("train.param_dtype", message, config.train.param_dtype)
            return
        updated = torch.float32 if getattr(optimizer, "state_dtype", None) == "fp32" else own
        if (entry := facts.get(name)) is None:
            continue
        for state, kind in states_of(with_options(optimizer, entry), entry.shape).items():
            seen = _dtype(saved.get(f"optimizer.{name}.{state}"))
            if kind.dtype == "parameter" and seen is not None and seen != updated:
                use = "fp32" if seen is torch.float32 else "parameter"
                message = f"{checkpoint.path} has {name}.{state} in {_dtype_name(seen)}; use {use}"
                yield ConfigIssue("optimizer.state_dtype", message, optimizer.state_dtype)
                return


def _dtype(entry: Any) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(getattr(entry, "properties", None), "dtype", None)
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, known in _DTYPES.items() if known == dtype), str(dtype))


def _kinds(states: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in states}


def _list_kinds(kinds: set[str]) -> str:
    return f"states {', '.join(sorted(kinds))}" if kinds else "no states"
