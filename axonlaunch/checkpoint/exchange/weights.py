"""Loads initial weights into a run, exports weights as safetensors, and imports exported weights.

Weights of a different model are refused with the names and shapes that differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from axonlaunch.checkpoint.exchange import adapters, base_weights
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.checkpoint.format.new_folder import new_folder
from axonlaunch.checkpoint.format.storage import storage_path
from axonlaunch.checkpoint.loading import reader
from axonlaunch.config import CONFIG as RUN_CONFIG, ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.options.adapter import is_of_adapter
from axonlaunch.config.options.data import DATASETS, PythonSourceConfig, SyntheticTokensConfig
from axonlaunch.config.options.model import GPTConfig, LlamaConfig, MoEConfig
from axonlaunch.config.precision import NUMBER_FORMATS
from axonlaunch.config.problems.frozen_file import name_frozen_file
from axonlaunch.config.validation.validate import validate
from axonlaunch.config.values.environment_values import without_environment
from axonlaunch.data.tokenizers.tokenizer import (
    FOLDER as TOKENIZER,
    PretrainedTokenizer,
    load_kept,
    read_foreign,
)
from axonlaunch.data.tokenizers.tokenizer_files import foreign_files, model_of_folder
from axonlaunch.models.source_of import model_in_folder, source_of
from axonlaunch.models.specs.model_spec import model_of
from axonlaunch.system.storage.files import LARGEST_WEIGHTS_FILE, write_copy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from axonlaunch.comm import World

TRAINED_ON = "axonlaunch"
"""Key of an exported ``config.json`` with the data of the run, which determines the tokenizer."""


class HasWeights(Protocol):
    """Protocol of an engine that takes weights."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers by name; sharded ones are DTensors."""

    def load_model_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the state from ``model_state_dict`` after it was filled."""


def load_initial_weights(engine: HasWeights, config: Any, *, world: World) -> None:
    """Load the initial weights that the configuration names, if any; a collective call.

    Args:
        engine: Engine of this rank, which reads only its shards.
        config: Configuration of the run or of its model.
        world: World of the calling ranks.
    """
    key_and_path = source_of(config).initial_weights()
    adapter = config.adapter if isinstance(config, RunConfig) else None
    if key_and_path is None and (adapter is None or adapter.path is None):
        return
    model_state = engine.model_state_dict()
    if key_and_path is not None:
        # An adapter is initialized from the seed or from adapter.path.
        pretrained = {
            n: t for n, t in model_state.items() if adapter is None or not is_of_adapter(n)
        }
        _load_named(pretrained, key_and_path[1], config, world=world)
        if adapter is not None and adapter.dora:
            from axonlaunch.models.adapters.dora import fill_magnitudes
            from axonlaunch.models.adapters.lora import transposed_layers
            from axonlaunch.models.build import on_meta

            layers = transposed_layers(on_meta(config, seed=config.seed))
            fill_magnitudes(model_state, transposed=layers)
    if adapter is not None and adapter.path is not None:
        adapters.load_peft(model_state, Path(adapter.path))
    engine.load_model_state_dict(model_state)


def _load_named(state: dict[str, Tensor], path: str, config: Any, *, world: World) -> None:
    """Fill parameters and buffers from a run, a checkpoint or a folder of safetensors.

    Quantized parameters that are saved as values are read one at a time: each rank reads and
    quantizes its part.
    """
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.exchange.safetensors import Reader
    from axonlaunch.checkpoint.loading.dcp_reader import source
    from axonlaunch.checkpoint.loading.planners import ReadsBoxes
    from axonlaunch.comm.mesh import local_part
    from axonlaunch.models.tensors.packed_blocks import empty_values, format_of

    folder = storage_path(path)
    checkpoint = reader.find_for_all(folder, world=world)
    formats = {name: stored for name, part in state.items() if (stored := format_of(part))}
    files: Any = (
        Reader(folder, config, packed=formats) if checkpoint is None else source(checkpoint.path)
    )
    saved = files.shapes() if checkpoint is None else reader.shapes(checkpoint)
    values = {
        name: (state[name], stored)
        for name, stored in formats.items()
        if saved.get(name) != tuple(state[name].shape)
    }
    rest = {name: tensor for name, tensor in state.items() if name not in values}
    if checkpoint is not None:
        reader.load_checkpoint(checkpoint, {"model": rest}, world=world)
    else:
        present = {name: tensor for name, tensor in rest.items() if name in saved}
        dcp.load({"model": present}, storage_reader=files, planner=ReadsBoxes())
    for name, (packed, stored) in values.items():
        part = empty_values(packed)
        dcp.load({"model": {name: part}}, storage_reader=files, planner=ReadsBoxes())
        local_part(packed).copy_(stored.quantize(local_part(part)))


def differences(path: Path, config: Any, model: nn.Module) -> list[str]:
    """Compare saved weights with the names and shapes of a model's parameters.

    Adapter parameters are ignored, because the pretrained weights don't include them.

    Args:
        path: Run, checkpoint or folder of safetensors.
        config: Configuration of the run or of its model.
        model: Model on any device, also ``meta``.

    Returns:
        A line for each parameter that is missing, unknown, or of another shape; [] if equal.

    Raises:
        ConfigError: The path holds no weights, or those of a model of transformers for ``gpt`` or
            ``llama``.
    """
    from axonlaunch.models.adapters.lora import adapter_names
    from axonlaunch.models.adapters.quantized_base import quantized_names

    added = adapter_names(model)
    checkpoint = step_folders.find_checkpoint(path)
    if checkpoint is not None:
        return reader.model_differences(checkpoint, model, without=added, quantizes=True)
    from axonlaunch.checkpoint.exchange.safetensors import CONFIG_FILE, Reader, read_json

    is_ours, file = isinstance(model_of(config), GPTConfig | LlamaConfig), path / CONFIG_FILE
    if is_ours and file.exists() and "model_type" in read_json(file):
        message = f"{file}: is of a model of transformers; {hf_instead(path)}"
        raise ConfigError([ConfigIssue("", message)])
    buffers = {name for name, _ in model.named_buffers()}
    formats = quantized_names(model)
    files = Reader(path, config, packed=formats)
    if files.blocks:
        for name in sorted(formats.keys() - files.packed.keys()):
            stored = "in nf4" if name in files.blocks else "unquantized"
            return [f"{name} is saved {stored}, not in {formats[name].name}"]
    saved = files.shapes()
    return reader.mismatches(saved, model, optional=buffers, without=added, quantizes=True)


def export_weights(
    checkpoint: Checkpoint,
    config: RunConfig,
    folder: Path,
    *,
    dtype: str | None = None,
    file_bytes: int = LARGEST_WEIGHTS_FILE,
    merge: bool = False,
) -> list[str]:
    """Write the weights of a checkpoint as safetensors; an adapter is written as PEFT's folder.

    Args:
        checkpoint: Checkpoint to export.
        config: Configuration of its run.
        folder: New or empty folder.
        dtype: ``fp32``, ``bf16`` or ``fp16`` for floating-point tensors; None keeps theirs.
        file_bytes: Maximum size of a file, except for a larger tensor.
        merge: Whether to write the full model with the adapter merged into it.

    Returns:
        Names of the written files.

    Raises:
        ConfigError: The folder is not empty or can't be written, or PEFT's format can't store the
            trained parameters.
        CorruptCheckpointError: A file of the checkpoint was changed or damaged.
    """
    from axonlaunch.models.torch_dtypes import torch_dtype

    if merge and config.adapter is None:
        message = f"--merge: {checkpoint.path} has no adapter; remove this option"
        raise ConfigError([ConfigIssue("", message)])
    with name_frozen_file(checkpoint.path.parent.parent / RUN_CONFIG), new_folder(folder):
        if config.adapter is not None and not merge:
            reader.refuse_damage(checkpoint)
            written = adapters.write_peft(checkpoint, config, folder)
            return [*written, *_copy_tokenizer(checkpoint.path.parent.parent, folder)]
        kept = None if dtype is None else torch_dtype(NUMBER_FORMATS[dtype])
        return _write_model(checkpoint, config, folder, dtype=kept, file_bytes=file_bytes)


def _write_model(
    checkpoint: Checkpoint,
    config: RunConfig,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> list[str]:
    """Write the full model; return the names of the files."""
    from axonlaunch.checkpoint.exchange import safetensors

    entries = reader.parameters(checkpoint)
    if config.adapter is not None:
        entries = {name: entry for name, entry in entries.items() if not is_of_adapter(name)}
    left_out = base_weights.left_out(config)
    names = sorted({*entries, *left_out}, key=_naturally)
    reader.refuse_damage(checkpoint)
    contents = {f"{reader.MODEL}{name}": entry for name, entry in entries.items()}
    saved = [name for name in names if name not in left_out]
    read = reader.tensors(checkpoint, [f"{reader.MODEL}{name}" for name in saved], contents)
    run_dir = checkpoint.path.parent.parent
    from_base = [name for name in names if name in left_out]
    others = base_weights.base_tensors(config, from_base, run_dir)
    in_order = (
        (name, next(others)[1] if name in left_out else base_weights.values_of(config, next(read)))
        for name in names
    )
    tensors = adapters.merged(checkpoint, config, in_order)
    written = safetensors.write_safetensors(
        folder, config.model, tensors, dtype=dtype, file_bytes=file_bytes
    )
    source = source_of(config)
    content, copied = source.config_json(), source.copy_files(folder)
    content[TRAINED_ON] = {"data": config.data.name}
    if length := config.sequence_length:
        content[TRAINED_ON]["sequence_length"] = length
    if files := _copy_tokenizer(run_dir, folder):
        content[TRAINED_ON]["tokenizer"] = model_of_folder(run_dir / TOKENIZER)
        copied = [*(name for name in copied if name not in files), *files]
        if config.tokenizer.special:
            ids = _special_ids(run_dir, [*config.tokenizer.special])
            source_of(config).set_special_tokens(content, folder, ids)
    kept = base_weights.kept_dtype(config)
    if not left_out and entries[names[0]].properties.dtype.is_floating_point:
        kept = entries[names[0]].properties.dtype
    content["dtype"] = str(dtype or kept).removeprefix("torch.")
    text = json.dumps(without_environment(content), indent=1) + "\n"
    (folder / safetensors.CONFIG_FILE).write_text(text)
    return [*written, safetensors.CONFIG_FILE, *copied]


def _copy_tokenizer(run_dir: Path, folder: Path) -> list[str]:
    """Copy the tokenizer in the run folder; it replaces the tokenizer of the pretrained model."""
    files = foreign_files(run_dir / TOKENIZER)
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_copy(folder / name, file)
    return [*files]


def _special_ids(run_dir: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of special tokens of the run's tokenizer, of those that a model names."""
    kept = load_kept(run_dir)
    assert kept is not None
    wanted = [name for name in names if name in ("eos", "bos", "pad")]
    return {name: getattr(kept.transformers, f"{name}_token_id") for name in wanted}


def exported_tokenizer(folder: Path) -> PretrainedTokenizer | None:
    """Return the tokenizer that was exported with a run's weights; None without one.

    Raises:
        ConfigError: The tokenizer can't be read.
    """
    from axonlaunch.checkpoint.exchange.safetensors import CONFIG_FILE, read_json

    model = read_json(folder / CONFIG_FILE).get(TRAINED_ON, {}).get("tokenizer")
    if model is None:
        return None
    # The value is from a foreign file, and the weights may be of another type of model.
    return read_foreign(folder, model=model if isinstance(model, dict) else {})


def _naturally(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that keeps a block's names together and puts block 2 before block 10."""
    segments = name.split(".")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in segments]


def how_to_load(folder: Path, config: RunConfig, *, is_adapter: bool) -> str:
    """Return the Python code or the setting that loads exported weights."""
    if source_of(config).library is None:
        sample = ", or axonlaunch sample" if config.model.name in ("gpt", "llama") else ""
        return f"model.weights={folder}{sample and f'{sample} {folder}'}"
    model = "transformers.AutoModelForCausalLM.from_pretrained"
    if config.adapter is None or not is_adapter:
        return f"{model}({str(folder)!r})"
    base, adapter = f"{model}({config.model_path!r})", repr(str(folder))
    if not source_of(config).has_grown_vocabulary():
        return f"peft.PeftModel.from_pretrained({base}, {adapter})"
    if config.tokenizer.add_tokens:  # PEFT adds the rows of the tokenizer's tokens to the base
        return f"peft.AutoPeftModelForCausalLM.from_pretrained({adapter})"
    described: Any = config.model
    resized = f"base = {base}; base.resize_token_embeddings({described.config['vocab_size']})"
    return f"{resized}; peft.PeftModel.from_pretrained(base, {adapter})"


def import_weights(folder: Path, run_dir: Path, config: RunConfig) -> Path:
    """Create a run at step 0 from exported weights of a model of text.

    Args:
        folder: Folder with the weights and their ``config.json``.
        run_dir: Folder of the new run.
        config: Configuration of the new run; its model and data are replaced.

    Returns:
        Folder of the new checkpoint.

    Raises:
        ConfigError: The folder can't be read or was not exported from a run on text or tokens, a
            parameter is missing or has another shape, or the run exists or can't be written.
    """
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.saving.dcp_writer import Writer
    from axonlaunch.config import to_yaml
    from axonlaunch.models.build import on_meta

    model, data = describe_folder(folder)
    config = with_values(config, {"model": model, "data": data, "name": run_dir.name})
    config = with_values(config, {"run_dir": str(run_dir.absolute())})
    target = Checkpoint(
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
        dcp.save({"model": state}, storage_writer=Writer(target), no_dist=True)
        (run_dir / RUN_CONFIG).write_text(to_yaml(config))
    return target.path


def describe_folder(
    folder: Path,
) -> tuple[Any, PythonSourceConfig | SyntheticTokensConfig]:
    """Return the model of an exported folder, typed, and data like the data of its run.

    A ``gpt`` or ``llama`` describes itself. A model of transformers is accepted if it was exported
    from a run on text; any other folder is left to ``model=hf``.

    Raises:
        ConfigError: The ``config.json`` can't be read, or describes another model.
    """
    from axonlaunch.checkpoint.exchange.safetensors import CONFIG_FILE, read_json

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
    described = model_in_folder(folder)
    if "tokenizer" in trained_on:
        return described, SyntheticTokensConfig(sequence_length=length)
    return described, PythonSourceConfig(sequence_length=length)


def _typed_model(content: Mapping[str, Any], *, file: Path) -> GPTConfig | LlamaConfig:
    """Return the model of the ``config.json`` of an exported ``gpt``, ``llama`` or ``moe``.

    Raises:
        ConfigError: The model is a different one, or a setting is invalid.
    """
    ours: dict[str, type[GPTConfig | LlamaConfig]] = {
        "gpt": GPTConfig,
        "llama": LlamaConfig,
        "moe": MoEConfig,
    }
    schema = ours.get(str(content["name"]))
    if schema is None:
        message = (
            f"{file}: is of model={content['name']}; only gpt, llama, moe and hf can be read here"
        )
        raise ConfigError([ConfigIssue("", f"{message}; train with model.weights={file.parent}")])
    names = {field.name for field in fields(schema)} - {"weights"}
    settings = {key: value for key, value in content.items() if key in names}
    checked = validate(settings, schema)
    if checked.problems:
        raise ConfigError([ConfigIssue("", f"{file}: {checked.problems[0]}")])
    typed: GPTConfig | LlamaConfig = checked.config
    return typed


def hf_instead(folder: Path) -> str:
    """Return the end of a message: the options that use a folder in the format of transformers."""
    return f"use model=hf model.path={folder}"


def was_trained_on_text(folder: Path) -> bool:
    """Return whether a folder of safetensors was exported from a run on byte-level text."""
    from axonlaunch.checkpoint.exchange.safetensors import CONFIG_FILE, read_json

    trained_on = read_json(folder / CONFIG_FILE).get(TRAINED_ON)
    return isinstance(trained_on, dict) and _is_text(str(trained_on.get("data")))


def _is_text(name: str) -> bool:
    """Return whether a dataset of this name is registered and yields bytes of text."""
    facts = DATASETS.facts(name) if DATASETS.is_registered(name) else None
    return facts is not None and facts.is_text


def read_folder(folder: Path, model: Any) -> dict[str, Tensor]:
    """Read all weights of a folder of safetensors; the caller compares them with the model.

    Raises:
        ConfigError: A file can't be read.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.exchange.safetensors import Reader

    source = Reader(folder, model)
    state = {name: torch.empty(shape) for name, shape in source.shapes().items()}
    with reader.in_one_process():
        dcp.load({"model": state}, storage_reader=source, no_dist=True)
    return state


def first(problems: list[str]) -> str:
    """Join the first ten problems and the number of the others."""
    more = f"; {len(problems) - 10} more" if len(problems) > 10 else ""
    return "; ".join(problems[:10]) + more
