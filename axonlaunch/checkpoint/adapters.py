"""Adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, and merged weights.

PEFT's names of tensors are ours behind a prefix. What it offers beyond LoRA of linear layers is
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint import reader
from axonlaunch.checkpoint.manifest import Checkpoint
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.adapter import LoraConfig, is_of_adapter
from axonlaunch.config.model import HuggingFaceConfig

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAGNITUDE, _THEIR_MAGNITUDE = ".lora_magnitude_vector.weight", ".lora_magnitude_vector"
_ABSENT = (
    *("modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("lora_bias", "layer_replication", "trainable_token_indices", "use_qalora", "alora_offset"),
)
"""Keys of ``adapter_config.json`` that change what an adapter computes, where they are set."""


@dataclass(frozen=True)
class PeftFolder:
    """What a folder of PEFT's says of its adapter.

    Attributes:
        rank: Of A and B.
        alpha: As ``adapter.alpha``.
        rslora: As ``adapter.rslora``.
        dora: As ``adapter.dora``.
        targets: Full names of the adapted layers.
        shapes: Of its tensors, by our names.
    """

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    targets: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]


def read_peft(folder: Path) -> PeftFolder:
    """Read what a folder of PEFT's describes, without the numbers.

    Raises:
        ConfigError: It can't be read, or is of another kind than LoRA of linear layers.
    """
    from safetensors import SafetensorError, safe_open

    try:
        content = json.loads((folder / _CONFIG_FILE).read_text())
        with safe_open(folder / _WEIGHTS_FILE, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        files = f"{_CONFIG_FILE} and {_WEIGHTS_FILE}"
        message = f"is no folder of PEFT's, {files}: {str(error).splitlines()[0]}"
        raise ConfigError([ConfigIssue("adapter.path", message, str(folder))]) from None
    if problems := [*_unsupported(content, shapes)]:
        raise ConfigError(
            [ConfigIssue("adapter.path", problem, str(folder)) for problem in problems]
        )
    named = {_our_name(key): shape for key, shape in shapes.items()}
    return PeftFolder(
        rank=int(content["r"]),
        alpha=float(content["lora_alpha"]),
        rslora=bool(content.get("use_rslora", False)),
        dora=bool(content.get("use_dora", False)),
        targets=tuple(name.removesuffix(_A) for name in named if name.endswith(_A)),
        shapes=named,
    )


def _unsupported(content: dict[str, Any], shapes: Iterable[str]) -> Iterator[str]:
    if content.get("peft_type") != "LORA":
        yield f"its peft_type is {content.get('peft_type')}; only LORA can be read"
        return
    for key in _ABSENT:
        if content.get(key):
            yield f"it has {key}={content[key]}, which is not supported"
    if content.get("bias", "none") != "none":
        yield f"it has bias={content['bias']}, which is not supported"
    other = [
        key for key in shapes if not (key.startswith(_PREFIX) and is_of_adapter(_our_name(key)))
    ]
    if other:
        yield f"it holds {other[0]}, which is no matrix of LoRA on a linear layer"
    ends = (_A, _B, _MAGNITUDE) if content.get("use_dora") else (_A, _B)
    names = {_our_name(key) for key in shapes}
    layers = {name.rpartition(".lora_")[0] for name in names}
    if lacking := sorted({f"{layer}{end}" for layer in layers for end in ends} - names):
        yield f"it lacks {_their_name(lacking[0]).removeprefix(_PREFIX)}"
    if not isinstance(content.get("r"), int) or not isinstance(
        content.get("lora_alpha"), int | float
    ):
        yield "it says no r or no lora_alpha"


def _our_name(key: str) -> str:
    """Return our name of a tensor of PEFT's."""
    name = key.removeprefix(_PREFIX)
    if name.endswith(_THEIR_MAGNITUDE):
        return f"{name.removesuffix(_THEIR_MAGNITUDE)}{_MAGNITUDE}"
    return name


def _their_name(name: str) -> str:
    """Return PEFT's name of a tensor of ours."""
    if name.endswith(_MAGNITUDE):
        return f"{_PREFIX}{name.removesuffix(_MAGNITUDE)}{_THEIR_MAGNITUDE}"
    return f"{_PREFIX}{name}"


def load_peft(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the adapters of a rank with those of a folder of PEFT's, in place.

    Args:
        state: This rank's parameters by name, divided ones as DTensors.
        folder: Its shapes are the adapters'.
    """
    from safetensors import safe_open

    from axonlaunch.models.dtensor_regions import local_boxes

    with safe_open(folder / _WEIGHTS_FILE, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            parameter: Any = state.get(_our_name(key))
            if parameter is None:
                continue  # another stage's
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            for box in local_boxes(parameter) if local.numel() else ():
                region = tuple(slice(start, start + count) for start, count in box.region)
                box.of(local).copy_(file.get_slice(key)[region])


def write_peft(checkpoint: Checkpoint, config: RunConfig, folder: Path) -> list[str]:
    """Write a run's adapter as PEFT does; ``PeftModel.from_pretrained`` loads it.

    Args:
        checkpoint: Whose.
        config: Of its run.
        folder: There, and empty.

    Returns:
        The names of what was written.

    Raises:
        ConfigError: PEFT has no place for what the run trained.
    """
    from safetensors.torch import save_file

    adapter = config.adapter
    assert adapter is not None
    if not isinstance(config.model, HuggingFaceConfig):
        message = (
            f"PEFT adapts models of transformers, and this is {config.model.name}; use --merge"
        )
        raise ConfigError([ConfigIssue("", f"{checkpoint.path}: {message}")])
    layers, beside, transposed = _trained(config)
    if beside:
        message = f"{beside[0]} was trained beside the adapter; use --merge"
        raise ConfigError([ConfigIssue("", f"{checkpoint.path}: {message}")])
    parts = _parts(checkpoint, adapter, layers)
    save_file(
        {_their_name(name): tensor for name, tensor in parts.items()},
        folder / _WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "revision": config.model.revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "target_modules": layers,
        "fan_in_fan_out": bool(transposed),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / _CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return [_WEIGHTS_FILE, _CONFIG_FILE]


def merged(
    checkpoint: Checkpoint, config: RunConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's weights with those of adapted layers as their adapters make them.

    Args:
        checkpoint: Whose.
        config: Of its run; without an adapter they are what they are.
        tensors: The model's own, by name.
    """
    adapter = config.adapter
    if adapter is None:
        yield from tensors
        return
    layers, _, transposed = _trained(config)
    parts = _parts(checkpoint, adapter, layers)
    for name, tensor in tensors:
        layer = name.removesuffix(".weight")
        if f"{layer}{_A}" not in parts:
            yield name, tensor
            continue
        weight = (tensor.t() if layer in transposed else tensor).float()
        product = parts[f"{layer}{_B}"].float() @ parts[f"{layer}{_A}"].float()
        weight = weight + adapter.scale * product
        if adapter.dora:
            weight *= (parts[f"{layer}{_MAGNITUDE}"].float() / weight.norm(dim=1)).unsqueeze(1)
        yield name, (weight.t() if layer in transposed else weight).to(tensor.dtype).contiguous()


def _trained(config: RunConfig) -> tuple[list[str], list[str], set[str]]:
    """Return a run's adapted layers, what else is trained, and layers whose weight is [in, out]."""
    from axonlaunch.models.build import on_meta
    from axonlaunch.models.lora import LoraLayer, transposed_layers

    model = on_meta(config, seed=config.seed)
    layers = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    beside = [name for name in trained if not is_of_adapter(name)]
    return layers, beside, transposed_layers(model)


def _parts(checkpoint: Checkpoint, adapter: LoraConfig, layers: Iterable[str]) -> dict[str, Tensor]:
    """Return A and B, and magnitudes, of each layer, whole, by name."""
    ends = (_A, _B, _MAGNITUDE) if adapter.dora else (_A, _B)
    names = [f"{layer}{end}" for layer in layers for end in ends]
    entries = reader.parameters(checkpoint)
    contents = {f"{reader.MODEL}{name}": entries[name] for name in names}
    return dict(zip(names, reader.tensors(checkpoint, [*contents], contents), strict=True))


def with_peft_settings(
    config: RunConfig, folder: PeftFolder
) -> tuple[LoraConfig, list[ConfigIssue]]:
    """Return a run's adapter as the folder that it starts from has it, and what contradicts it.

    Args:
        config: With an adapter.
        folder: What is in its ``adapter.path``.
    """
    from dataclasses import replace

    adapter, defaults = config.adapter, LoraConfig()
    assert adapter is not None
    own: dict[str, Any] = {"rank": folder.rank, "alpha": folder.alpha, "rslora": folder.rslora}
    own |= {"dora": folder.dora, "targets": [*folder.targets]}
    problems = [
        ConfigIssue(f"adapter.{key}", f"{adapter.path} has {value}; remove this setting", chosen)
        for key, value in own.items()
        if (chosen := getattr(adapter, key)) not in (getattr(defaults, key), value)
    ]
    return replace(adapter, **own), problems
