"""Adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, and merged weights.

PEFT's names of tensors are ours behind a prefix, but for magnitudes and packed experts. What it
offers beyond LoRA and DoRA of linear layers, and LoRA of packed experts, is refused by name.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from axonlaunch.checkpoint import reader
from axonlaunch.checkpoint.manifest import Checkpoint
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.adapter import EXPERTS, MAGNITUDE, LoraConfig, is_of_adapter
from axonlaunch.config.errors import one_of
from axonlaunch.config.model import HuggingFaceConfig

if TYPE_CHECKING:
    from torch import Tensor

    from axonlaunch.models.expert_lora import ExpertMatrices

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_THEIR_MAGNITUDE = MAGNITUDE.removesuffix(".weight")
_NESTED = ".base_layer"
_PACKED = re.compile(rf"(?P<holder>.+)\.(?P<key>[^.]+){EXPERTS}(?P<end>\.lora_[AB]\.weight)")
_ABSENT = (
    *("modules_to_save", "rank_pattern", "alpha_pattern"),
    *("lora_bias", "layer_replication", "trainable_token_indices", "use_qalora", "alora_offset"),
)
"""Keys of ``adapter_config.json`` that change what an adapter computes, where they are set."""
_FLOATS = ["F64", "F32", "F16", "BF16"]
_LARGEST_ALPHA = 1e9


@dataclass(frozen=True)
class PeftFolder:
    """What a folder of PEFT's says of its adapter.

    Attributes:
        rank: Of A and B.
        alpha: As ``adapter.alpha``.
        rslora: As ``adapter.rslora``.
        dora: As ``adapter.dora``.
        targets: Full names of the adapted layers, and patterns of packed experts.
        shapes: Of its tensors, by PEFT's names.
    """

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    targets: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]


def read_peft(folder: Path) -> PeftFolder:
    """Read the settings and shapes of a PEFT folder, without the numbers.

    Raises:
        ConfigError: It can't be read, or is of another kind than LoRA of linear layers.
    """
    content, entries = _read_files(folder)
    problems = [*_mistyped_settings(content)] or [*_unsupported_parts(content, entries)]
    if problems or (problems := [*_mismatched_matrices(content["r"], entries)]):
        raise ConfigError(
            [ConfigIssue("adapter.path", problem, str(folder)) for problem in problems]
        )
    packed = tuple(content.get("target_parameters") or ())
    holders = [f".{name.rpartition('.')[0]}" for name in packed]
    layers = [key.removesuffix(_A) for key in entries if key.endswith(_A)]
    linear = [
        layer.removeprefix(_PREFIX)
        for layer in layers
        if not layer.replace(_NESTED, "").endswith(tuple(holders))
    ]
    return PeftFolder(
        rank=content["r"],
        alpha=float(content["lora_alpha"]),
        rslora=bool(content.get("use_rslora", False)),
        dora=bool(content.get("use_dora", False)),
        targets=(*linear, *packed),
        shapes={key: shape for key, (_, shape) in entries.items()},
    )


_Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor of a file of safetensors, by name."""


def _read_files(folder: Path) -> tuple[dict[str, Any], _Entries]:
    """Read ``adapter_config.json``, and the types and shapes of the tensors.

    Raises:
        ConfigError: A file is missing, not a regular file, too large or damaged.
    """
    from axonlaunch.checkpoint.safetensors import open_safetensors, read_json

    try:
        content = read_json(folder / _CONFIG_FILE)
        with open_safetensors(folder / _WEIGHTS_FILE) as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return content, {k: (s.get_dtype(), tuple(s.get_shape())) for k, s in slices.items()}
    except ConfigError as error:
        files = f"{_CONFIG_FILE} and {_WEIGHTS_FILE}"
        message = f"is not a folder of PEFT's, {files}: {error.problems[0].message}"
        raise ConfigError([ConfigIssue("adapter.path", message, str(folder))]) from None


def _mistyped_settings(content: dict[str, Any]) -> Iterator[str]:
    """Yield the settings of ``adapter_config.json`` that are not of the type that PEFT writes."""
    if content.get("peft_type") != "LORA":
        yield f"its peft_type is {_shown(content.get('peft_type'))}; only LORA can be read"
        return
    rank: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield f"it has r={_shown(rank)}, not a whole number above 0"
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not 0 < alpha <= _LARGEST_ALPHA:
        yield f"it has lora_alpha={_shown(alpha)}, not a number above 0 and at most 1e9"
    for key in ("use_rslora", "use_dora"):
        if not isinstance(content.get(key), bool | None):
            yield f"it has {key}={_shown(content[key])}, not true or false"
    names = content.get("target_parameters")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        yield f"it has target_parameters={_shown(names)}, not a list of names"


def _unsupported_parts(content: dict[str, Any], entries: _Entries) -> Iterator[str]:
    for key in _ABSENT:
        if content.get(key):
            yield f"it has {key}={_shown(content[key])}, which is not supported"
    if content.get("bias", "none") != "none":
        yield f"it has bias={_shown(content['bias'])}, which is not supported"
    ends = (_A, _B, _THEIR_MAGNITUDE) if content.get("use_dora") else (_A, _B)
    other = [key for key in entries if not (key.startswith(_PREFIX) and key.endswith(ends))]
    if other:
        yield f"it holds {_shown(other[0])}, which is no matrix of LoRA on a linear layer"
    layers = {key.rpartition(".lora_")[0] for key in entries}
    if lacking := sorted({f"{layer}{end}" for layer in layers for end in ends} - {*entries}):
        yield f"it lacks {_shown(lacking[0].removeprefix(_PREFIX))}"
    for name in content.get("target_parameters") or ():
        if "." not in name:
            shown = _shown(name)
            yield f"it has target_parameters={shown}; name its module too, as experts.{shown}"


def _mismatched_matrices(rank: int, entries: _Entries) -> Iterator[str]:
    """Yield the first tensor whose type or shape is not that of an adapter of this rank."""
    for key, (dtype, shape) in entries.items():
        if dtype not in _FLOATS:
            yield f"its {_shown(key)} is of type {dtype}; an adapter has {one_of(_FLOATS)}"
            return
        if key.endswith(_A) and (len(shape) != 2 or shape[0] % rank):
            yield f"its {_shown(key)} is {[*shape]}, which does not fit its r={_shown(rank)}"
            return


def _shown(value: Any) -> str:
    """Shorten a value of a foreign file for a message."""
    return value if isinstance(value, str) and len(value) < 200 else reprlib.repr(value)


def peft_names(names: Iterable[str]) -> dict[str, str]:
    """Return PEFT's name of each tensor of an adapter by ours.

    It has no ``weight`` of magnitudes; and what it puts around a module for each of its packed
    parameters, one around the other, has no name: all but the outermost are ``base_layer``.

    Args:
        names: Of a model's parameters, or a stage's, in their order.
    """
    own = [name for name in names if is_of_adapter(name)]
    packed = [match for name in own if (match := _PACKED.fullmatch(name))]
    holders: dict[str, list[str]] = {}
    for match in packed:
        keys = holders.setdefault(match["holder"], [])
        keys += [match["key"]] if match["key"] not in keys else []
    theirs = {name: f"{_PREFIX}{name}" for name in own}
    for match in packed:
        keys = holders[match["holder"]]
        nested = _NESTED * (len(keys) - 1 - keys.index(match["key"]))
        theirs[match[0]] = f"{_PREFIX}{match['holder']}{nested}{match['end']}"
    for name in own:
        if name.endswith(MAGNITUDE):
            theirs[name] = f"{_PREFIX}{name.removesuffix(MAGNITUDE)}{_THEIR_MAGNITUDE}"
    return theirs


def load_peft(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the adapters of a rank with those of a folder of PEFT's, in place.

    Args:
        state: This rank's parameters by name, divided ones as DTensors.
        folder: Its shapes are the adapters'.
    """
    from axonlaunch.checkpoint.safetensors import open_safetensors
    from axonlaunch.models.dtensor_regions import local_boxes

    with open_safetensors(folder / _WEIGHTS_FILE) as file:
        for name, key in peft_names(state).items():
            parameter: Any = state[name]
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
    trained = _Trained.of(config)
    if trained.beside:
        message = f"{trained.beside[0]} was trained beside the adapter; use --merge"
        raise ConfigError([ConfigIssue("", f"{checkpoint.path}: {message}")])
    parts = _parts(checkpoint, trained)
    save_file(
        {key: parts[name] for name, key in peft_names(parts).items()},
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
        "target_modules": trained.layers,
        "target_parameters": [*trained.experts] or None,
        "fan_in_fan_out": bool(trained.transposed),
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
    from axonlaunch.models.dora import adapted_norms
    from axonlaunch.models.expert_lora import adapted_experts

    adapter = config.adapter
    if adapter is None:
        yield from tensors
        return
    trained = _Trained.of(config)
    parts = _parts(checkpoint, trained)
    for name, tensor in tensors:
        layer = name.removesuffix(".weight")
        if (matrices := trained.experts.get(name)) is not None:
            down, up = (parts[f"{name}{EXPERTS}{end}"].float() for end in (_A, _B))
            adapted = adapted_experts(
                *(tensor.float(), down, up),
                scale=matrices.lora_scale,
                is_transposed=matrices.is_transposed,
            )
            yield name, adapted.to(tensor.dtype)
            continue
        if f"{layer}{_A}" not in parts:
            yield name, tensor
            continue
        weight = (tensor.t() if layer in trained.transposed else tensor).float()
        down, up = (parts[f"{layer}{end}"].float() for end in (_A, _B))
        adapted = weight + adapter.scale * (up @ down)
        if adapter.dora:
            norms = adapted_norms(weight, down, up, scale=adapter.scale)
            adapted *= (parts[f"{layer}{MAGNITUDE}"].float() / norms).unsqueeze(1)
        adapted = adapted.t() if layer in trained.transposed else adapted
        yield name, adapted.to(tensor.dtype).contiguous()


@dataclass(frozen=True)
class _Trained:
    """What a run with an adapter trains.

    Attributes:
        names: Of the adapter's parameters, in their order.
        layers: Adapted linear ones.
        transposed: Of them those whose weight is [inputs, outputs].
        experts: Adapted parameters that pack experts, with what adapts them.
        beside: Names of what else is trained.
    """

    names: list[str]
    layers: list[str]
    transposed: set[str]
    experts: Mapping[str, ExpertMatrices]
    beside: list[str]

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Look at the model, which is built without storage."""
        from axonlaunch.models.build import on_meta
        from axonlaunch.models.lora import LoraLayer, adapted_experts_of, transposed_layers

        model = on_meta(config, seed=config.seed)
        named = dict(model.named_parameters())
        return cls(
            [name for name in named if is_of_adapter(name)],
            [name for name, part in model.named_modules() if isinstance(part, LoraLayer)],
            transposed_layers(model),
            adapted_experts_of(model),
            [n for n, p in named.items() if p.requires_grad and not is_of_adapter(n)],
        )


def _parts(checkpoint: Checkpoint, trained: _Trained) -> dict[str, Tensor]:
    """Return the adapter's tensors, whole, by name, in the order of the model."""
    entries = reader.parameters(checkpoint)
    contents = {f"{reader.MODEL}{name}": entries[name] for name in trained.names}
    return dict(zip(trained.names, reader.tensors(checkpoint, [*contents], contents), strict=True))


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
