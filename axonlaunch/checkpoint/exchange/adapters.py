"""Reads and writes adapters in PEFT's format, and merges adapters into weights.

The format has two files, ``adapter_config.json`` and ``adapter_model.safetensors``. PEFT's tensor
names are the model's names with a prefix, except for magnitudes and packed experts. Only LoRA and
DoRA of linear layers, LoRA of packed experts and full modules are supported; other features are
refused by name.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.checkpoint.loading import reader
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.adapter import EXPERTS, MAGNITUDE, LoraConfig, is_of_adapter
from axonlaunch.config.problems.errors import one_of
from axonlaunch.models.source_of import source_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.adapters.expert_lora import ExpertMatrices

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PEFT_MAGNITUDE = MAGNITUDE.removesuffix(".weight")
_LORA_ENDS = (_A, _B, _PEFT_MAGNITUDE)
_NESTED = ".base_layer"
_PACKED = re.compile(rf"(?P<holder>.+)\.(?P<key>[^.]+){EXPERTS}(?P<end>\.lora_[AB]\.weight)")
_ABSENT = (
    *("rank_pattern", "alpha_pattern", "lora_bias", "layer_replication"),
    *("trainable_token_indices", "use_qalora", "alora_offset"),
)
"""Unsupported keys of ``adapter_config.json`` that change the result of an adapter if set."""
_FLOATS = ["F64", "F32", "F16", "BF16"]
_LARGEST_ALPHA = 1e9


@dataclass(frozen=True)
class PeftFolder:
    """Settings and shapes of an adapter in a PEFT folder.

    Attributes:
        rank: Rank of the matrices A and B.
        alpha: Value for ``adapter.alpha``.
        rslora: Value for ``adapter.rslora``.
        dora: Value for ``adapter.dora``.
        targets: Full names of the adapted layers, and patterns of packed experts.
        full: Names of parameters of the model that the file has in full (``modules_to_save``).
        shapes: Shapes of the tensors by PEFT's names, without copies of tied parameters.
    """

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    targets: tuple[str, ...]
    full: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]


def read_peft(folder: Path) -> PeftFolder:
    """Read the settings and shapes of a PEFT folder, without the values.

    Raises:
        ConfigError: The folder can't be read, or the adapter has unsupported features.
    """
    content, entries = _read_files(folder)
    problems = [*_mistyped_settings(content)] or [*_unsupported_parts(content, entries)]
    if problems or (problems := [*_mismatched_matrices(content["r"], entries)]):
        raise ConfigError(
            [ConfigIssue("adapter.path", problem, str(folder)) for problem in problems]
        )
    packed = tuple(content.get("target_parameters") or ())
    full = [key for key in entries if _is_in_modules(key, content.get("modules_to_save"))]
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
        full=tuple(key.removeprefix(_PREFIX) for key in full),
        shapes={
            key: shape
            for key, (_, shape) in entries.items()
            if key in full or key.endswith(_LORA_ENDS)
        },
    )


_Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor in a safetensors file, by name."""


def _read_files(folder: Path) -> tuple[dict[str, Any], _Entries]:
    """Read ``adapter_config.json`` and the dtypes and shapes of the tensors.

    Raises:
        ConfigError: A file is missing, not a regular file, too large or damaged.
    """
    from axonlaunch.checkpoint.exchange.safetensors import open_safetensors, read_json

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
    """Yield the settings of ``adapter_config.json`` with a type that PEFT does not write."""
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
    for key in ("target_parameters", "modules_to_save"):
        names = content.get(key)
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            yield f"it has {key}={_shown(names)}, not a list of names"


def _unsupported_parts(content: dict[str, Any], entries: _Entries) -> Iterator[str]:
    for key in _ABSENT:
        if content.get(key):
            yield f"it has {key}={_shown(content[key])}, which is not supported"
    if content.get("bias", "none") != "none":
        yield f"it has bias={_shown(content['bias'])}, which is not supported"
    ends = (_A, _B, _PEFT_MAGNITUDE) if content.get("use_dora") else (_A, _B)
    matrices = [key for key in entries if key.startswith(_PREFIX) and key.endswith(ends)]
    full = [key for key in entries if _is_in_modules(key, content.get("modules_to_save"))]
    other = [key for key in entries if key not in {*matrices, *full}]
    # PEFT writes a copy of a tied parameter under its second name.
    if other and not (full and content.get("ensure_weight_tying")):
        yield f"it holds {_shown(other[0])}, which is no matrix of LoRA on a linear layer"
    layers = {key.rpartition(".lora_")[0] for key in matrices}
    if lacking := sorted({f"{layer}{end}" for layer in layers for end in ends} - {*entries}):
        yield f"it lacks {_shown(lacking[0].removeprefix(_PREFIX))}"
    for name in content.get("target_parameters") or ():
        if "." not in name:
            shown = _shown(name)
            yield f"it has target_parameters={shown}; name its module too, as experts.{shown}"


def _is_in_modules(key: str, modules: Sequence[str] | None) -> bool:
    """Return whether a tensor is a parameter of one of PEFT's ``modules_to_save``.

    PEFT compares the ends of module paths: ``lm_head`` and ``model.embed_tokens`` are both allowed.
    """
    path = f".{key.removeprefix(_PREFIX).rpartition('.')[0]}"
    return any(path.endswith(f".{module}") for module in modules or ())


def _mismatched_matrices(rank: int, entries: _Entries) -> Iterator[str]:
    """Yield the first tensor with a dtype or shape that does not fit the rank."""
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


def peft_names(names: Iterable[str], *, full: Iterable[str] = ()) -> dict[str, str]:
    """Return PEFT's tensor name for each parameter of the adapter and each full one.

    PEFT's names of magnitudes lack ``.weight``. For several packed parameters of one module, PEFT
    nests a wrapper per parameter, and each nested wrapper adds ``.base_layer`` to the name.

    Args:
        names: Parameter names of a model or a pipeline stage, in order.
        full: Names of parameters that the file has in full.
    """
    full = {*full}
    adapter_names = [name for name in names if is_of_adapter(name) or name in full]
    packed = [match for name in adapter_names if (match := _PACKED.fullmatch(name))]
    holders: dict[str, list[str]] = {}
    for match in packed:
        keys = holders.setdefault(match["holder"], [])
        keys += [match["key"]] if match["key"] not in keys else []
    of_peft = {name: f"{_PREFIX}{name}" for name in adapter_names}
    for match in packed:
        keys = holders[match["holder"]]
        nested = _NESTED * (len(keys) - 1 - keys.index(match["key"]))
        of_peft[match[0]] = f"{_PREFIX}{match['holder']}{nested}{match['end']}"
    for name in adapter_names:
        if name.endswith(MAGNITUDE):
            of_peft[name] = f"{_PREFIX}{name.removesuffix(MAGNITUDE)}{_PEFT_MAGNITUDE}"
    return of_peft


def load_peft(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill a rank's adapter parameters and full modules from a PEFT folder, in place.

    Args:
        state: Parameters of this rank by name; sharded ones are DTensors.
        folder: PEFT folder with the same shapes as the adapter.
    """
    from axonlaunch.checkpoint.exchange.safetensors import open_safetensors
    from axonlaunch.comm.mesh import local_part
    from axonlaunch.models.tensors.dtensor_regions import local_boxes

    names = peft_names(state, full=read_peft(folder).full)
    with open_safetensors(folder / _WEIGHTS_FILE) as file:
        for name, key in names.items():
            parameter = state[name]
            local = local_part(parameter)
            for box in local_boxes(parameter) if local.numel() else ():
                region = tuple(slice(start, start + count) for start, count in box.region)
                box.view(local).copy_(file.get_slice(key)[region])


def write_peft(checkpoint: Checkpoint, config: RunConfig, folder: Path) -> list[str]:
    """Write a run's adapter in the format that ``PeftModel.from_pretrained`` loads.

    Args:
        checkpoint: Checkpoint to export.
        config: Configuration of its run.
        folder: Existing empty folder.

    Returns:
        Names of the written files.

    Raises:
        ConfigError: PEFT's format can't store the trained parameters.
    """
    from safetensors.torch import save_file

    from axonlaunch.models.build import on_meta

    adapter = config.adapter
    assert adapter is not None
    model = on_meta(config, seed=config.seed)
    if (reason := why_not_peft(config, model)) is not None:
        message = f"{checkpoint.path}: {reason}; use --merge"
        raise ConfigError([ConfigIssue("", message)])
    base, trained = source_of(config).peft_base(), _Trained.of(model)
    assert base is not None
    parts = _parts(checkpoint, trained.names)
    others = _parts(checkpoint, trained.others)
    full = {
        f"{_PREFIX}{module}.{key}": others[first].clone()  # a file can't hold a tensor twice
        for module, names in trained.modules.items()
        for key, first in names.items()
    }
    save_file(
        {key: parts[name] for name, key in peft_names(parts).items()} | full,
        folder / _WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "target_modules": trained.layers,
        "target_parameters": [*trained.experts] or None,
        "modules_to_save": [name for name in trained.modules if name not in trained.tied] or None,
        **({"ensure_weight_tying": True} if trained.tied else {}),
        "fan_in_fan_out": bool(trained.transposed),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / _CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return [_WEIGHTS_FILE, _CONFIG_FILE]


def why_not_peft(config: RunConfig, model: nn.Module) -> str | None:
    """Return why PEFT's format can't store the trained parameters of a run with an adapter.

    Args:
        config: Configuration of the run.
        model: Complete model with its adapters, on the meta device or not.
    """
    if source_of(config).peft_base() is None:
        return f"PEFT adapts models of transformers, and this is {config.model.name}"
    trained = _Trained.of(model)
    in_modules = {first for parts in trained.modules.values() for first in parts.values()}
    left = next((name for name in trained.others if name not in in_modules), None)
    return None if left is None else f"{left} is trained in addition to the adapter"


def merged(
    checkpoint: Checkpoint, config: RunConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights with the adapter merged into the adapted layers.

    Args:
        checkpoint: Checkpoint with the adapter.
        config: Configuration of its run; without an adapter the tensors are unchanged.
        tensors: Names and tensors of the model without the adapter.
    """
    from axonlaunch.models.adapters.dora import adapted_norms
    from axonlaunch.models.adapters.expert_lora import adapted_experts
    from axonlaunch.models.build import on_meta

    adapter = config.adapter
    if adapter is None:
        yield from tensors
        return
    trained = _Trained.of(on_meta(config, seed=config.seed))
    parts = _parts(checkpoint, trained.names)
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
    """Trained parameters of a run with an adapter.

    Attributes:
        names: Names of the adapter's parameters, in order.
        layers: Names of the adapted linear layers.
        transposed: Names of adapted layers with a weight of shape [inputs, outputs].
        experts: Matrices of the adapter by the name of the packed parameter that they adapt.
        others: Names of other trained parameters.
        modules: Maps the path of each module that is trained in full to its parameters: the name
            in the module to the name in the model. A tied parameter has the first of its names.
    """

    names: list[str]
    layers: list[str]
    transposed: set[str]
    experts: Mapping[str, ExpertMatrices]
    others: list[str]
    modules: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Collect the names from a complete model, on the meta device or not."""
        from axonlaunch.models.adapters.lora import LoraLayer, adapted_experts_of, transposed_layers

        named = dict(model.named_parameters())
        others = {
            id(part): name
            for name, part in named.items()
            if part.requires_grad and not is_of_adapter(name)
        }
        held = {
            path: {key: others.get(id(part)) for key, part in module.named_parameters()}
            for path, module in model.named_modules(remove_duplicate=False)
            if any(True for _ in module.parameters(recurse=False))
        }
        return cls(
            [name for name in named if is_of_adapter(name)],
            [name for name, part in model.named_modules() if isinstance(part, LoraLayer)],
            transposed_layers(model),
            adapted_experts_of(model),
            [*others.values()],
            {
                path: {key: first for key, first in parts.items() if first is not None}
                for path, parts in held.items()
                if None not in parts.values()
            },
        )

    @property
    def tied(self) -> set[str]:
        """Modules of ``modules`` that share all parameters with earlier ones."""
        earlier: set[str] = set()
        shared = set()
        for module, parts in self.modules.items():
            shared |= {module} if {*parts.values()} <= earlier else set()
            earlier |= {*parts.values()}
        return shared


def _parts(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, Tensor]:
    """Return full tensors by name, in the same order."""
    entries = reader.parameters(checkpoint)
    contents = {f"{reader.MODEL}{name}": entries[name] for name in names}
    return dict(zip(names, reader.tensors(checkpoint, [*contents], contents), strict=True))


def with_peft_settings(
    config: RunConfig, folder: PeftFolder
) -> tuple[LoraConfig, list[ConfigIssue]]:
    """Return the adapter settings of a PEFT folder, and the settings that contradict it.

    Args:
        config: Configuration with an adapter.
        folder: Content of its ``adapter.path``.
    """
    from dataclasses import replace

    adapter, defaults = config.adapter, LoraConfig()
    assert adapter is not None
    settings: dict[str, Any] = {"rank": folder.rank, "alpha": folder.alpha}
    settings |= {"rslora": folder.rslora, "dora": folder.dora, "targets": [*folder.targets]}
    problems = [
        ConfigIssue(f"adapter.{key}", f"{adapter.path} has {value}; remove this setting", chosen)
        for key, value in settings.items()
        if (chosen := getattr(adapter, key)) not in (getattr(defaults, key), value)
    ]
    return replace(adapter, **settings), problems
