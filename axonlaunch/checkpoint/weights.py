"""Weights that come from elsewhere and go elsewhere: into a new run, to and from safetensors.

Weights of another model are refused, name by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from axonlaunch.checkpoint import adapters, base, reader, step_folders
from axonlaunch.checkpoint.manifest import Checkpoint
from axonlaunch.checkpoint.new_folder import new_folder
from axonlaunch.checkpoint.storage import storage_path
from axonlaunch.config import CONFIG as RUN_CONFIG
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, to_tree, with_values
from axonlaunch.config.adapter import is_of_adapter
from axonlaunch.config.data import DATASETS, PythonSourceConfig, SyntheticTokensConfig
from axonlaunch.config.environment_values import without_environment
from axonlaunch.config.model import GPTConfig, HuggingFaceConfig, LlamaConfig
from axonlaunch.config.validate import validate
from axonlaunch.data.tokenizer import FOLDER as TOKENIZER
from axonlaunch.data.tokenizer import (
    PretrainedTokenizer,
    foreign_files,
    model_of_folder,
    read_foreign,
)
from axonlaunch.system.files import write_copy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from axonlaunch.comm import World

TRAINED_ON = "axonlaunch"
"""Key of an exported ``config.json``: the data that the run was on, by which its text is read."""


class HasWeights(Protocol):
    """What weights can be loaded into: an engine."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers by name, divided ones as DTensors."""

    def load_model_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``model_state_dict`` gave, once it is filled."""


def load_initial_weights(engine: HasWeights, config: Any, *, world: World) -> None:
    """Fill an engine with the weights that its model names, if it names any.

    Args:
        engine: A rank's; each reads its part alone.
        config: A run's, or that of its model alone.
        world: Whose ranks all call this.
    """
    from axonlaunch.models.build import initial_weights

    spelled = initial_weights(config)
    adapter = config.adapter if isinstance(config, RunConfig) else None
    if spelled is None and (adapter is None or adapter.path is None):
        return
    model_state = engine.model_state_dict()
    if spelled is not None:
        # An adapter starts as the seed says, or as its own folder does.
        own = {n: t for n, t in model_state.items() if adapter is None or not is_of_adapter(n)}
        _load_named(own, spelled[1], config, world=world)
        if adapter is not None and adapter.dora:
            from axonlaunch.models.build import on_meta
            from axonlaunch.models.dora import fill_magnitudes
            from axonlaunch.models.lora import transposed_layers

            layers = transposed_layers(on_meta(config, seed=config.seed))
            fill_magnitudes(model_state, transposed=layers)
    if adapter is not None and adapter.path is not None:
        adapters.load_peft(model_state, Path(adapter.path))
    engine.load_model_state_dict(model_state)


def _load_named(read: dict[str, Tensor], path: str, config: Any, *, world: World) -> None:
    """Fill parameters and buffers from a run, a checkpoint or a folder of safetensors."""
    from axonlaunch.models.build import model_of

    where = storage_path(path)
    checkpoint = reader.find_for_all(where, world=world)
    if checkpoint is not None:
        reader.load_checkpoint(checkpoint, {"model": read}, world=world)
    else:
        import torch.distributed.checkpoint as dcp

        from axonlaunch.checkpoint.planners import ReadsBoxes
        from axonlaunch.checkpoint.safetensors import Reader

        source = Reader(where, model_of(config))
        known = source.shapes()
        named = {name: tensor for name, tensor in read.items() if name in known}
        dcp.load({"model": named}, storage_reader=source, planner=ReadsBoxes())


def differences(path: Path, config: Any, model: nn.Module) -> list[str]:
    """Compare saved weights with the names and shapes of a model's parameters.

    What an adapter adds to the model is not among the weights that it starts from.

    Args:
        path: A run, a checkpoint or a folder of safetensors.
        config: Of the run, or of its model alone.
        model: On ``meta`` or not.

    Returns:
        A line for each parameter that is missing, unknown, or of another shape; [] if equal.

    Raises:
        ConfigError: The path holds no weights, or those of a model of transformers for ``gpt`` or
            ``llama``.
    """
    from axonlaunch.models.lora import adapter_names

    added = adapter_names(model)
    checkpoint = step_folders.find_checkpoint(path)
    if checkpoint is not None:
        return reader.model_differences(checkpoint, model, without=added)
    from axonlaunch.checkpoint.safetensors import CONFIG_FILE, Reader, read_json
    from axonlaunch.models.build import model_of

    is_ours, file = isinstance(model_of(config), GPTConfig | LlamaConfig), path / CONFIG_FILE
    if is_ours and file.exists() and "model_type" in read_json(file):
        message = f"{file}: is of a model of transformers; {hf_instead(path)}"
        raise ConfigError([ConfigIssue("", message)])
    buffers = {name for name, _ in model.named_buffers()}
    saved = Reader(path, config).shapes()
    return reader.mismatches(saved, model, beside=buffers, without=added)


def export_weights(
    checkpoint: Checkpoint,
    config: RunConfig,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
    merge: bool = False,
) -> list[str]:
    """Write a checkpoint's weights as safetensors, file by file; of an adapter PEFT's folder.

    Args:
        checkpoint: Whose.
        config: Of its run.
        folder: New, or empty.
        dtype: Floating-point numbers become this; None: they stay.
        file_bytes: Size from which another file is begun.
        merge: Write the whole model, adapters merged into it.

    Returns:
        The names of what was written.

    Raises:
        ConfigError: The folder holds something or can't be written, or PEFT has no place for what
            was trained.
        CorruptCheckpointError: A file of the checkpoint is not what was written.
    """
    if merge and config.adapter is None:
        message = f"--merge: {checkpoint.path} has no adapter; remove this option"
        raise ConfigError([ConfigIssue("", message)])
    with new_folder(folder):
        if config.adapter is not None and not merge:
            reader.refuse_damage(checkpoint)
            written = adapters.write_peft(checkpoint, config, folder)
            return [*written, *_copy_tokenizer(checkpoint.path.parent.parent, folder)]
        return _write_whole(checkpoint, config, folder, dtype=dtype, file_bytes=file_bytes)


def _write_whole(
    checkpoint: Checkpoint,
    config: RunConfig,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> list[str]:
    """Write the whole model; return the names of the files."""
    from axonlaunch.checkpoint import safetensors

    entries = reader.parameters(checkpoint)
    if config.adapter is not None:
        entries = {name: entry for name, entry in entries.items() if not is_of_adapter(name)}
    left_out = base.left_out(config)
    names = sorted({*entries, *left_out}, key=_naturally)
    reader.refuse_damage(checkpoint)
    contents = {f"{reader.MODEL}{name}": entry for name, entry in entries.items()}
    saved = [name for name in names if name not in left_out]
    read = reader.tensors(checkpoint, [f"{reader.MODEL}{name}" for name in saved], contents)
    others = base.base_tensors(config, [name for name in names if name in left_out])
    whole = ((name, next(others)[1] if name in left_out else next(read)) for name in names)
    tensors = adapters.merged(checkpoint, config, whole)
    written = safetensors.write_safetensors(
        folder, config.model, tensors, dtype=dtype, file_bytes=file_bytes
    )
    copied: list[str] = []
    if isinstance(config.model, HuggingFaceConfig):
        from axonlaunch.models.hf import exported

        content = exported.config_json(config.model)
        copied = exported.copy_besides(config.model, folder)
    else:
        content = to_tree(config.model)
    content[TRAINED_ON] = {"data": config.data.name}
    if length := getattr(config.data, "sequence_length", None):
        content[TRAINED_ON]["sequence_length"] = length
    run_dir = checkpoint.path.parent.parent
    if files := _copy_tokenizer(run_dir, folder):
        content[TRAINED_ON]["tokenizer"] = model_of_folder(run_dir / TOKENIZER)
        copied = [*(name for name in copied if name not in files), *files]
    own = base.kept_dtype(config) if left_out else entries[names[0]].properties.dtype
    content["dtype"] = str(dtype or own).removeprefix("torch.")
    text = json.dumps(without_environment(content), indent=1) + "\n"
    (folder / safetensors.CONFIG_FILE).write_text(text)
    return [*written, safetensors.CONFIG_FILE, *copied]


def _copy_tokenizer(run_dir: Path, folder: Path) -> list[str]:
    """Copy the tokenizer that a run has kept, over that of the model that it started from."""
    files = foreign_files(run_dir / TOKENIZER)
    for name, file in files.items():
        write_copy(folder / name, file)
    return [*files]


def exported_tokenizer(folder: Path) -> PretrainedTokenizer | None:
    """Return the tokenizer that was exported with a run's weights; None: there is none.

    Raises:
        ConfigError: It can't be read.
    """
    from axonlaunch.checkpoint.safetensors import CONFIG_FILE, read_json

    model = read_json(folder / CONFIG_FILE).get(TRAINED_ON, {}).get("tokenizer")
    if model is None:
        return None
    # Of earlier versions it is no object. The folder's own model may be of another type.
    return read_foreign(folder, model=model if isinstance(model, dict) else {})


def _naturally(name: str) -> list[tuple[bool, int, str]]:
    """Return what sorts names so that block 2 comes before block 10, and a block stays together."""
    segments = name.split(".")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in segments]


def import_weights(folder: Path, run_dir: Path, config: RunConfig) -> Path:
    """Create a run at step 0 from exported weights of a model of text.

    Args:
        folder: Folder with the weights and their ``config.json``.
        run_dir: The new run's.
        config: What the run is to be, but for its model.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: The folder can't be read or was not exported from a run on text or tokens, a
            parameter is missing or has another shape, or the run exists or can't be written.
    """
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.dcp_writer import Writer
    from axonlaunch.config import to_yaml
    from axonlaunch.models.build import on_meta

    model, data = describe_folder(folder)
    config = with_values(config, {"model": model, "data": data, "name": run_dir.name})
    config = with_values(config, {"run_dir": str(run_dir.absolute())})
    about = Checkpoint(
        step_folders.path_of(run_dir, step=0),
        0,
        0,
        1,
        None,
        layout="imported",
        saved_at=time.time(),
    )
    with new_folder(run_dir), reader.in_one_process():
        if wrong := differences(folder, model, on_meta(config, seed=config.seed)):
            raise ConfigError([ConfigIssue("", f"{folder}: {first(wrong)}")])
        state = read_folder(folder, model)
        dcp.save({"model": state}, storage_writer=Writer(about), no_dist=True)
        (run_dir / RUN_CONFIG).write_text(to_yaml(config))
    return about.path


def describe_folder(
    folder: Path,
) -> tuple[GPTConfig | LlamaConfig | HuggingFaceConfig, PythonSourceConfig | SyntheticTokensConfig]:
    """Return the model of an exported folder, and data like the data of its run.

    A ``gpt`` or ``llama`` describes itself. A model of transformers is accepted if it was exported
    from a run on text; any other folder is left to ``model=hf``.

    Raises:
        ConfigError: Its ``config.json`` can't be read, or is of another model.
    """
    from axonlaunch.checkpoint.safetensors import CONFIG_FILE, read_json

    file = folder / CONFIG_FILE
    content = read_json(file)
    trained_on = content.get(TRAINED_ON)
    trained_on = trained_on if isinstance(trained_on, dict) else {}
    is_text = _is_text(str(trained_on.get("data")))
    length = trained_on.get("sequence_length")
    length = length if isinstance(length, int) else 0
    if "model_type" not in content and "name" in content:
        model = _typed_model(content, file=file)
        length = length or model.max_position_embeddings
        if is_text and "tokenizer" not in trained_on:
            return model, PythonSourceConfig(sequence_length=length)
        return model, SyntheticTokensConfig(vocab_size=model.vocab_size, sequence_length=length)
    if not is_text or not length:
        message = f"{file}: is of a model of transformers; {hf_instead(folder)}"
        raise ConfigError([ConfigIssue("", message)])
    described = HuggingFaceConfig(path=str(folder.absolute()), init="random")
    if "tokenizer" in trained_on:
        return described, SyntheticTokensConfig(sequence_length=length)
    return described, PythonSourceConfig(sequence_length=length)


def _typed_model(content: Mapping[str, Any], *, file: Path) -> GPTConfig | LlamaConfig:
    """Return the model of the ``config.json`` of an exported ``gpt`` or ``llama``.

    Raises:
        ConfigError: It is another model, or a setting is invalid.
    """
    schema = {"gpt": GPTConfig, "llama": LlamaConfig}.get(str(content["name"]))
    if schema is None:
        message = f"{file}: is of model={content['name']}; only gpt, llama and hf can be read here"
        raise ConfigError([ConfigIssue("", f"{message}; train with model.weights={file.parent}")])
    names = {field.name for field in fields(schema)} - {"weights"}
    settings = {key: value for key, value in content.items() if key in names}
    checked = validate(settings, schema)
    if checked.problems:
        raise ConfigError([ConfigIssue("", f"{file}: {checked.problems[0]}")])
    typed: GPTConfig | LlamaConfig = checked.config
    return typed


def hf_instead(folder: Path) -> str:
    """Return the words that say which options take a folder of transformers."""
    return f"use model=hf model.path={folder}"


def was_trained_on_text(folder: Path) -> bool:
    """Say whether a folder of safetensors was exported of a run on text as bytes."""
    from axonlaunch.checkpoint.safetensors import CONFIG_FILE, read_json

    trained_on = read_json(folder / CONFIG_FILE).get(TRAINED_ON)
    return isinstance(trained_on, dict) and _is_text(str(trained_on.get("data")))


def _is_text(name: str) -> bool:
    """Say whether a dataset of this name is registered and gives bytes of text."""
    facts = DATASETS.facts(name) if DATASETS.is_registered(name) else None
    return facts is not None and facts.is_text


def read_folder(
    folder: Path, model: GPTConfig | LlamaConfig | HuggingFaceConfig
) -> dict[str, Tensor]:
    """Read all weights of a folder of safetensors; the caller compares them with the model.

    Raises:
        ConfigError: A file can't be read.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.safetensors import Reader

    source = Reader(folder, model)
    state = {name: torch.empty(shape) for name, shape in source.shapes().items()}
    with reader.in_one_process():
        dcp.load({"model": state}, storage_reader=source, no_dist=True)
    return state


def first(problems: list[str]) -> str:
    """Join the first ten problems, and say how many more there are."""
    more = f"; {len(problems) - 10} more" if len(problems) > 10 else ""
    return "; ".join(problems[:10]) + more
