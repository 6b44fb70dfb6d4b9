"""Selects the linear layers that compute their products in ``train.matmul_dtype``.

These are the linear layers of the repeated blocks, or of a model without such blocks. Left out are:

- the head, and what else a model computes after its blocks;
- layers that share their weight with an embedding, or whose class computes something else;
- routers and gates: layers beside experts, layers with as many outputs as there are experts, and
  those with fewer than 16 outputs;
- experts that are packed in one parameter, because torch's grouped products in fp8 need other
  scales. A note of the run says which share of the weights is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.config.optimization.parameter_groups import explain_unmatched
from axonlaunch.config.options.adapter import is_of_adapter
from axonlaunch.models.adapters.expert_lora import packed_experts
from axonlaunch.models.adapters.lora import LoraLayer, linear_layer_sizes, linear_layers
from axonlaunch.models.facts.flops import count_experts
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import logical_numel, logical_shape

_LEAST_OUTPUTS = 16


def scaled_layers(config: RunConfig, spec: ModelSpec, module: nn.Module) -> dict[str, nn.Module]:
    """Return the selected layers of an unsharded model by name."""
    exclude = config.train.matmul_exclude
    candidates = _candidates(module, spec)
    return {
        name: layer
        for name, layer in candidates.items()
        if not any(_matches(name, pattern) for pattern in exclude)
    }


def selection_problems(
    config: RunConfig, spec: ModelSpec, module: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield patterns that match no layer, and a selection without layers."""
    candidates, key = _candidates(module, spec), "train.matmul_exclude"
    for pattern in config.train.matmul_exclude:
        if not any(_matches(name, pattern) for name in candidates):
            message = f"{pattern} matches no layer with products in {config.train.matmul_dtype}"
            yield ConfigIssue(key, f"{message}{explain_unmatched(pattern, [*candidates])}")
    if not candidates:
        message = "the model has no linear layer except its head, routers and gates; use null"
        yield ConfigIssue("train.matmul_dtype", message, config.train.matmul_dtype)
    elif not scaled_layers(config, spec, module):
        message = "leaves no layer; use train.matmul_dtype=null"
        yield ConfigIssue(key, message, config.train.matmul_exclude)


def note_on_experts(config: RunConfig, spec: ModelSpec, module: nn.Module) -> str | None:
    """Return a note on packed experts that are left out: the share of weights that is rounded.

    Weights are the matrices of the blocks, without adapters.

    Args:
        config: Configuration with ``train.matmul_dtype``.
        spec: Spec of the model.
        module: Unsharded model on any device.
    """
    experts = packed_experts(module)
    blocks = tuple(f"{name}." for name in spec.blocks(module))
    sizes = {
        name: logical_numel(parameter)
        for name, parameter in module.named_parameters()
        if name.startswith(blocks or "") and not is_of_adapter(name)
        if len(logical_shape(parameter)) > 1
    }
    if not sizes.keys() & experts.keys():
        return None
    rounded = sum(sizes.get(f"{name}.weight", 0) for name in scaled_layers(config, spec, module))
    share, dtype = rounded / sum(sizes.values()), config.train.matmul_dtype
    why = "because packed experts are left out"
    return f"train.matmul_dtype={dtype}: rounds {share:.0%} of the blocks' weights, {why}"


def _candidates(module: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    blocks = tuple(f"{name}." for name in spec.blocks(module))
    last = tuple(f"{end}." for end in (spec.ends[1] if spec.ends else ()))
    # A router may be a child of a module beside the experts, and has an output for each of them.
    experts = {
        path[: path.rfind(".") + 1]: count
        for path, child in module.named_modules()
        if (count := count_experts(path, child))
    }
    holders = {name.rpartition(".")[0] for name in spec.experts(module)}
    return {
        name: layer
        for name, layer in linear_layers(module, spec).items()
        if (not blocks or name.startswith(blocks))
        and not f"{name}.".startswith(last)
        and name.rpartition(".")[0] not in holders
        and _computes_product(layer)
        and (outputs := linear_layer_sizes(layer)[1]) >= _LEAST_OUTPUTS
        and not any(name.startswith(at) and outputs == count for at, count in experts.items())
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _computes_product(layer: nn.Module) -> bool:
    """Return whether a layer's class has the forward of ``nn.Linear``, or is GPT-2's Conv1D."""
    base = layer.base_class if isinstance(layer, LoraLayer) else type(layer)
    return not issubclass(base, nn.Linear) or base.forward is nn.Linear.forward
