"""Checks the checkpoint or the weights from which a run starts, before a rank starts.

Only sizes, names and shapes are checked. The ranks read the contents and verify their checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.exchange.base_weights import find_base_problems
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.checkpoint.format.step_folders import find_checkpoint
from axonlaunch.checkpoint.format.storage import CHECKPOINTS, reaching, storage_path
from axonlaunch.checkpoint.loading import fallback, reader
from axonlaunch.checkpoint.loading.resume_source import checkpoint_root, resume_of
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.consistency.resumed_settings import frozen_settings
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.optimization.optimizer import OPTIMIZERS
from axonlaunch.config.optimization.parameter_groups import states_of, with_options
from axonlaunch.config.options.data import DATASETS
from axonlaunch.config.precision import (
    EIGHT_BITS,
    FP32,
    NUMBER_FORMATS,
    PRECISIONS,
    master_format,
    state_format,
)
from axonlaunch.config.problems.errors import plain
from axonlaunch.config.schema import CheckpointConfig
from axonlaunch.config.values.optional_keys import optimizer_groups
from axonlaunch.config.values.plain_values import flatten
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.datasets.describe_rows import describe_rows
from axonlaunch.data.datasets.origin import Origin, changed_data_issues, is_other_data
from axonlaunch.data.texts.learned_tokenizer import load_or_learn
from axonlaunch.data.tokenizers.tokenizer import FOLDER, load_kept
from axonlaunch.models.adapters.lora import not_saved
from axonlaunch.models.build import spec_for
from axonlaunch.models.facts.parameter_facts import parameter_facts
from axonlaunch.models.source_of import source_of
from axonlaunch.models.torch_dtypes import torch_dtype
from axonlaunch.system.storage.files import is_there, why_no_folder

if TYPE_CHECKING:
    from torch import nn

_DTYPES = {name: torch_dtype(stored) for name, stored in NUMBER_FORMATS.items()} | {
    EIGHT_BITS: torch.uint8
}
"""Types by their names in ``train.param_dtype`` and ``optimizer.state_dtype``."""
_SHAPING = ("rank", "dora", "targets")
"""Settings of an adapter that decide the names and shapes of its tensors."""
_OF_ADDED_TOKENS = ("tokenizer.add_tokens", "tokenizer.special")


def with_resumed_precision(config: RunConfig) -> RunConfig:
    """Decide ``train.precision=auto`` of a run that resumes: the precision that it began with.

    A run that began on a GPU thus continues on a CPU with the same arithmetic.
    """
    if config.train.precision != "auto":
        return config
    try:
        if (root := checkpoint_root(config)) is None:
            return config
        with reaching(root):
            if resume_of(config) != "auto" or find_checkpoint(root) is None:
                return config
            began = frozen_settings(root / CONFIG).get("train.precision")
    except (ConfigError, OSError, ValueError):
        return config  # reported where the run is resumed
    return with_values(config, {"train.precision": began}) if began in PRECISIONS else config


def checkpoint_problems(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield problems with the checkpoint or the weights from which a run starts.

    Args:
        config: Configuration of the run.
        model: Model of the run, on the meta device or not.
    """
    key, path = "checkpoint.resume", config.checkpoint.resume
    if path in ("auto", "never") and config.checkpoint.path is not None:
        key, path = "checkpoint.path", config.checkpoint.path
    try:
        yield from _resume(config, model)
    except ConfigError as error:
        yield from _explain_unreached(error, key, path)
    yield from _weights(config, model)


def _explain_unreached(error: ConfigError, key: str, path: str) -> Iterator[ConfigIssue]:
    """Yield the errors of a location that can't be reached as problems of a key."""
    for problem in error.problems:
        message = problem.message.removeprefix(f"{path}: ")
        yield ConfigIssue(key, message, path, is_transient=problem.is_transient)


def _weights(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    try:
        named = source_of(config).initial_weights()
    except ConfigError as error:
        yield from error.problems
        return
    if named is None:
        return
    key, path = named
    if config.checkpoint.resume not in ("auto", "never") and config.saves_frozen:
        if key != "model.weights":
            return  # the checkpoint replaces the weights in the model's folder
        message = f"checkpoint.resume={config.checkpoint.resume} contains weights already; use null"
        yield ConfigIssue(key, message, path)
        return
    try:
        folder = storage_path(path)
        with reaching(folder):
            is_folder = folder.is_dir()
    except ConfigError as error:
        yield from _explain_unreached(error, key, path)
        return
    if not is_folder:
        use = "give a run, a checkpoint, or a folder of safetensors"
        message = f"{why_no_folder(folder)}; {use}"
        yield ConfigIssue(key, message, path)
        return
    try:
        differences = weights.differences(folder, config.model, model)
    except ConfigError as error:
        for problem in error.problems:
            yield ConfigIssue(key, problem.message, path, is_transient=problem.is_transient)
    else:
        if differences:
            message = f"they were saved with a different model: {weights.first(differences)}"
            yield ConfigIssue(key, message, path)


def _resume(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    resume = resume_of(config)
    if resume == "never":
        yield from _overwritten(config.checkpoint)
        return
    folder = _resumed_from(config)
    if folder is None:
        return
    with reaching(folder):
        checkpoint, wrong = fallback.newest_valid(folder)
        if wrong and (checkpoint is None or resume != "auto" or not config.checkpoint.fallback):
            yield _corrupt(resume, wrong, checkpoint)
        elif checkpoint is not None:
            yield from _resumable(config, model, checkpoint)
            yield from _other_tokenizer(config, checkpoint.path.parent.parent)
        elif resume != "auto":
            message = "there is no complete checkpoint in it"
            is_inside = folder.name == CHECKPOINTS and is_there(folder.parent / CONFIG)
            message += f"; give the run, {folder.parent}" if is_inside else ""
            yield ConfigIssue("checkpoint.resume", message, resume)


def _resumed_from(config: RunConfig) -> Path | None:
    """Return the folder that may contain the checkpoint to resume from; None starts from step 0."""
    resume = resume_of(config)
    if resume == "never":
        return None
    return checkpoint_root(config) if resume == "auto" else storage_path(resume)


def changed_data_problems(config: RunConfig, dataset: Dataset) -> list[ConfigIssue]:
    """Return a problem for each difference between the run's data and that of its checkpoint."""
    if config.checkpoint.changed_data == "restart" or (found := _origins(config, dataset)) is None:
        return []
    checkpoint, saved, current = found
    if saved is None:
        return []
    return changed_data_issues(saved, current, checkpoint=checkpoint.path, data=config.data)


def first_row_at(config: RunConfig, dataset: Dataset) -> int:
    """Return the number of samples of other data that a run read before its current data."""
    if (found := _origins(config, dataset)) is None:
        return 0
    checkpoint, saved, current = found
    restarts = config.checkpoint.changed_data == "restart"
    is_changed = is_other_data(saved, current, restarts=restarts)
    return checkpoint.samples if is_changed else checkpoint.first_row_at


def _origins(
    config: RunConfig, dataset: Dataset
) -> tuple[Checkpoint, Origin | None, Origin] | None:
    """Return the checkpoint to resume from and descriptions of its data and the current data.

    Return None if the run starts from step 0.
    """
    if (checkpoint := _newest(config)) is None:
        return None
    saved = None if checkpoint.origin is None else Origin.from_dict(checkpoint.origin)
    return checkpoint, saved, describe_rows(config, dataset, like=saved)


def _newest(config: RunConfig) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from; None if it starts from step 0."""
    if (folder := _resumed_from(config)) is None:
        return None
    with reaching(folder):
        return fallback.newest_valid(folder)[0]


def resumed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the frozen configuration of the run whose data this run continues, by dotted key.

    Options of the rows are those of the checkpoint: a run that changed its data and ended before
    it saved has left others in its configuration. The result is {} if this run starts from step 0
    or with new data, or if the configuration can't be read, which is reported elsewhere.
    """
    if config.checkpoint.changed_data == "restart":
        return {}
    try:
        checkpoint = _newest(config)
        if checkpoint is None:
            return {}
        with reaching(checkpoint.path):
            settings = frozen_settings(checkpoint.path.parent.parent / CONFIG)
        rows = {} if checkpoint.origin is None else checkpoint.origin["options"]
        return settings | flatten(rows, "data")
    except (ConfigError, OSError, ValueError):
        return {}


def epochs_problems(config: RunConfig, *, epochs: float | None) -> Iterator[ConfigIssue]:
    """Yield a problem if a run has already done more steps than its epochs take.

    Args:
        config: Configuration with ``train.steps`` resolved from the epochs.
        epochs: Configured value of ``train.epochs``.
    """
    checkpoint = None if epochs is None else _newest(config)
    if checkpoint is not None and checkpoint.step > config.train.num_steps:
        message = (
            f"{checkpoint.path} has done {checkpoint.step} steps already, but this is "
            f"{config.train.num_steps} steps; use more to continue training"
        )
        yield ConfigIssue("train.epochs", message, epochs)


def _other_tokenizer(config: RunConfig, run_dir: Path) -> Iterator[ConfigIssue]:
    """Yield a problem if the tokenizer differs from that of the run to resume."""
    if not DATASETS.facts(config.data.name).takes_tokenizer:
        return
    try:
        saved = load_kept(run_dir)
        data: Any = config.data
        current = load_or_learn(config.tokenizer, data, report=lambda state: None)
    except ConfigError:
        return  # the check of the data reports this error
    if saved is None or saved.fingerprint == current.fingerprint:
        return
    if changed := [*_other_added_tokens(config, run_dir)]:
        yield from changed
    elif config.tokenizer.name == "train":
        message = (
            "data.files have changed, so training the tokenizer again gives another one than the "
            f"run used; use tokenizer=auto tokenizer.path={run_dir / FOLDER}"
        )
        yield ConfigIssue("tokenizer.name", message, "train")
    else:
        message = f"is not the tokenizer that the run was trained with; use {run_dir / FOLDER}"
        yield ConfigIssue("tokenizer.path", message, config.tokenizer.path)


def _other_added_tokens(config: RunConfig, run_dir: Path) -> Iterator[ConfigIssue]:
    """Yield a problem if the run to resume has added other tokens to its tokenizer."""
    try:
        began = frozen_settings(run_dir / CONFIG)
    except (OSError, ValueError):
        return  # reported where the run is resumed
    now = flatten(config.tokenizer, "tokenizer")
    for key in sorted({*began, *now}):
        was, chosen = began.get(key) or None, now.get(key) or None  # empty: no token
        if key.startswith(_OF_ADDED_TOKENS) and was != chosen:
            how = "without it; remove it" if was is None else f"with {plain(was)}; use that"
            yield ConfigIssue(key, f"{run_dir} was trained {how}", chosen)


def _overwritten(saving: CheckpointConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if a run from step 0 would write to another run's checkpoint folder."""
    path = saving.path
    if path is None:
        return
    with reaching(storage_path(path)):
        checkpoint = step_folders.latest(storage_path(path))
    if checkpoint is not None and saving.overwrite:
        message = (
            f"{checkpoint.path} exists, and checkpoint.path is not moved aside; use another "
            "checkpoint.path, or false"
        )
        yield ConfigIssue("checkpoint.overwrite", message, True)
    elif checkpoint is not None:
        message = (
            f"{checkpoint.path} exists; use another checkpoint.path, or resume from it with auto"
        )
        yield ConfigIssue("checkpoint.resume", message, "never")


def _corrupt(resume: str, wrong: dict[Path, str], checkpoint: Checkpoint | None) -> ConfigIssue:
    """Return the problem of corrupt checkpoints, with the alternatives."""
    reasons = "; ".join(f"{path} {reason}" for path, reason in wrong.items())
    return ConfigIssue("checkpoint.resume", f"{reasons}; {fallback.instead(checkpoint)}", resume)


def _resumable(
    config: RunConfig, model: nn.Module, checkpoint: Checkpoint
) -> Iterator[ConfigIssue]:
    """Compare a checkpoint with the run that resumes from it."""
    resume = config.checkpoint.resume
    if config.train.steps != "auto" and checkpoint.step > config.train.steps:
        message = f"{checkpoint.path} has done {checkpoint.step} already; use more to train on"
        yield ConfigIssue("train.steps", message, config.train.steps)
    if checkpoint.samples != checkpoint.step * config.train.global_batch_size:
        message = (
            f"{checkpoint.path} has used {checkpoint.samples // max(1, checkpoint.step)} samples "
            "per step; use the same, so that no sample is skipped or repeated"
        )
        yield ConfigIssue("train.global_batch_size", message, config.train.global_batch_size)
    differences = reader.model_differences(checkpoint, model, without=not_saved(config, model))
    other_adapter = [*_other_adapter(config, checkpoint, has_other_tensors=bool(differences))]
    if reader.is_of_a_run(checkpoint):
        if not (differences and other_adapter):  # else states differ because their tensors do
            yield from _other_states(config, checkpoint, model)
        yield from _other_types(config, checkpoint, model)
    else:
        message = (
            f"{checkpoint.path} contains weights only (no optimizer state); use auto, and "
            f"model.weights={checkpoint.path} with another name"
        )
        yield ConfigIssue("checkpoint.resume", message, resume)
    yield from find_base_problems(config, checkpoint.path.parent.parent)
    yield from other_adapter
    if differences and not other_adapter:
        message = (
            f"{checkpoint.path} was saved with a different model: {weights.first(differences)}"
        )
        yield ConfigIssue("checkpoint.resume", message, resume)


def _other_adapter(
    config: RunConfig, checkpoint: Checkpoint, *, has_other_tensors: bool
) -> Iterator[ConfigIssue]:
    """Yield a problem for each setting of the adapter that the saved one was not trained with.

    Args:
        config: Configuration of the run that resumes.
        checkpoint: Checkpoint that it resumes from.
        has_other_tensors: Whether the checkpoint has other names or shapes than the model.
    """
    try:
        began = frozen_settings(checkpoint.path.parent.parent / CONFIG)
    except (OSError, ValueError):
        return  # reported where the run is resumed
    adapter, saved = config.adapter, began.get("adapter.name")
    now = None if adapter is None else adapter.name
    if saved != now and has_other_tensors:
        message = f"{checkpoint.path} was trained with adapter={plain(saved)}; use that"
        yield ConfigIssue("adapter", message, now)
    if adapter is None or saved != now:
        return
    trained = {
        "base": "on a base with ",
        **dict.fromkeys(("alpha", "rslora"), "in the scale of "),
        **dict.fromkeys(_SHAPING if has_other_tensors else (), "with "),
    }
    for name, how in trained.items():
        key, current = f"adapter.{name}", getattr(adapter, name)
        was = began.get(key, getattr(type(adapter), name))
        if was != current:
            message = f"{checkpoint.path} was trained {how}{key}={plain(was)}; use that"
            yield ConfigIssue(key, message, current)


def _other_states(
    config: RunConfig, checkpoint: Checkpoint, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield a problem if the saved optimizer states differ from those of this run's optimizer."""
    optimizer, saved = config.optimizer, reader.saved_states(checkpoint)
    facts = parameter_facts(spec_for(config), model)
    expected = {
        f"{name}.{state}"
        for name, parameter in facts.items()
        for state in states_of(with_options(optimizer, parameter), parameter.shape)
    }
    if saved == expected:
        return
    kinds, expected_kinds = _kinds(saved), _kinds(expected)
    # If only the momentum of SGD differs, the problem is that field and not the optimizer.
    states = OPTIMIZERS.facts(optimizer.name).states or ()
    depends_on = {state.name: state.absent_at_zero for state in states}
    fields = {depends_on.get(name) for name in kinds ^ expected_kinds}
    field = fields.pop() if len(fields) == 1 else None
    if field is not None:
        use = "use the saved value, above 0" if saved else "use 0, as in the saved run"
        message = f"{checkpoint.path} has {_list_kinds(kinds)}; {use}"
        yield ConfigIssue(f"optimizer.{field}", message, getattr(optimizer, field))
    elif kinds == expected_kinds:
        other = sorted(saved ^ expected)[0]
        verb = "has" if other in saved else "lacks"
        message = f"{checkpoint.path} was saved with other groups: it {verb} {other}; use the same"
        yield ConfigIssue("optimizer.groups", message, optimizer_groups(optimizer))
    else:
        message = (
            f"{checkpoint.path} was saved with a different optimizer; it has {_list_kinds(kinds)}"
        )
        yield ConfigIssue("optimizer.name", message, optimizer.name)


def _other_types(
    config: RunConfig, checkpoint: Checkpoint, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield a problem if weights or states were saved in another type than this run uses."""
    saved, optimizer = reader.contents(checkpoint), config.optimizer
    precision, states = precision_of(config), state_format(config.optimizer)
    facts = parameter_facts(spec_for(config), model)
    for name, parameter in model.named_parameters():
        stored = precision.saved if parameter.requires_grad else precision.parameters
        is_kept = not stored.is_low or (config.adapter is not None and parameter.requires_grad)
        expected = parameter.dtype if is_kept else torch_dtype(stored)
        actual = _dtype(saved.get(f"{reader.MODEL}{name}"))
        if actual is not None and parameter.is_floating_point() and actual != expected:
            yield _other_weights(config, f"{checkpoint.path} has {name} in {_dtype_name(actual)}")
            return
        updated = expected if states is None else torch_dtype(states)
        if (entry := facts.get(name)) is None:
            continue
        for state, kind in states_of(with_options(optimizer, entry), entry.shape).items():
            actual = _dtype(saved.get(f"optimizer.{name}.{state}"))
            if kind.is_packed:
                now = _DTYPES[EIGHT_BITS]
            elif kind.dtype == "parameter":
                now = updated
            else:
                continue
            if actual is not None and actual != now:
                use = _dtype_name(actual) if actual != expected else "parameter"
                message = (
                    f"{checkpoint.path} has {name}.{state} in {_dtype_name(actual)}; use {use}"
                )
                yield ConfigIssue("optimizer.state_dtype", message, optimizer.state_dtype)
                return


def _other_weights(config: RunConfig, saved: str) -> ConfigIssue:
    """Return the problem that weights were saved in another type than the run's."""
    stored = config.train.param_dtype
    if master_format(config.optimizer) is None:
        use = "use that, or model.weights"
        if NUMBER_FORMATS[stored].is_low and saved.endswith(FP32.name):
            use = "use that, optimizer.master_weights=fp32, or model.weights"
        return ConfigIssue("train.param_dtype", f"{saved}; {use}", stored)
    message = f"{saved}, without masters; use null, or model.weights"
    return ConfigIssue("optimizer.master_weights", message, FP32.name)


def _dtype(entry: Any) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(getattr(entry, "properties", None), "dtype", None)
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, candidate in _DTYPES.items() if candidate == dtype), str(dtype))


def _kinds(states: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in states}


def _list_kinds(kinds: set[str]) -> str:
    return f"states {', '.join(sorted(kinds))}" if kinds else "no states"
