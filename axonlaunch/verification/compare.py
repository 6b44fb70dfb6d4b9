"""Proves that a layout computes what one process does, from the same weights and samples.

It compares losses, gradients and parameters, and names where they part; it saves nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from axonlaunch import data
from axonlaunch.checkpoint.weights import load_initial_weights
from axonlaunch.comm import RankFailedError, World
from axonlaunch.comm.json_exchange import all_gather_json
from axonlaunch.comm.rendezvous import local_place
from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.config.optimizer import MuonConfig
from axonlaunch.config.plugins import import_plugins
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.data.dataset import sample_inputs
from axonlaunch.data.loader import Loader, rank_loader
from axonlaunch.data.unknown_tokens import naming_unknown_tokens
from axonlaunch.engines.base import Engine
from axonlaunch.engines.build import build_engine
from axonlaunch.models.build import spec_for
from axonlaunch.models.dtensor_regions import whole
from axonlaunch.system import host
from axonlaunch.verification.result import (
    ParityResult,
    failed,
    layout_of,
    norm_tolerance,
    tolerance_of,
)

# AdamW divides by a gradient's size, and Lion takes its sign. Where that is nothing but rounding,
# as for the bias of keys, which softmax ignores, their usual eps would make whole steps in random
# directions of it.
_LEAST_EPS = 1e-4
_SAVED = "reference.pt"
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
# A gradient far smaller than the model's is judged beside this part of the model's usual size.
_GRADIENT_FLOOR = 0.1
# Biases start at 0: beside weights of about this size, what is smaller is no difference.
_PARAMETER_FLOOR = 0.02


class NoReferenceError(Exception):
    """One process gives nothing to compare with."""


@dataclass(frozen=True)
class Difference:
    """How far a quantity is from that of one process.

    Attributes:
        step: The step, from 1.
        kind: ``loss``, ``gradient``, ``norm`` (of the whole gradient) or ``parameter``.
        name: The parameter's; empty for a loss or a norm.
        relative: The distance beside the quantity's size; infinite where there is none.
        seen: A number that the layout gave, for losses and norms.
        expected: That number in one process.
    """

    step: int
    kind: str
    name: str
    relative: float
    seen: float | None = None
    expected: float | None = None

    def __str__(self) -> str:
        where = f"step {self.step}: "
        if self.seen is not None and self.expected is not None:
            what = "gradient norm" if self.kind == "norm" else self.kind
            return f"{where}{what} is {self.seen:.7g}, not {self.expected:.7g}"
        if math.isinf(self.relative):
            return f"{where}no rank has the {self.kind} of {self.name}"
        return f"{where}{self.kind} of {self.name} is off by {self.relative:.2g} of its size"


_ORDER = ("loss", "gradient", "norm", "parameter")


@dataclass(frozen=True)
class Reference:
    """What one process computes.

    Attributes:
        losses: By step.
        norms: Of the whole gradient by step, where it is clipped.
        gradients: By step, then by the parameter's name.
        parameters: After the last step, by name.
    """

    losses: list[float]
    norms: list[float | None]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def alone(config: RunConfig, *, steps: int) -> Reference:
    """Run some steps in one process, without any parallelism, on a world of one.

    Raises:
        NoReferenceError: They fail, or the model draws random numbers, as no two layouts do alike.
    """
    layout = Layout.of(config, world_size=num_ranks(config))

    def run(world: World) -> Reference:
        engine, loader = prepared_engine(_in_one_process(config, micro_batch_size="auto"), world)
        if spec_for(config.model).mixes_samples or _mixes_samples(engine.modules):
            same = _in_one_process(config, micro_batch_size=layout.micro_batch_size)
            engine, loader = prepared_engine(same, world)
        losses, norms, gradients = [], [], []
        for step in range(steps):
            batch = loader.batch(step)
            with naming_unknown_tokens(batch, loader, step=step):
                loss, _ = engine.backward(batch)
            if step == 0 and _has_drawn():
                raise NoReferenceError(
                    "the model draws random numbers in training, and no two layouts draw alike; "
                    "turn that off in model.arguments (nn.Dropout is off here by itself)"
                )
            losses.append(float(loss))
            gradients.append(
                {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
            )
            norms.append(_number(engine.update()[0]))
        return Reference(
            losses, norms, gradients, {n: p.detach() for n, p in engine.named_parameters()}
        )

    try:
        return World.mock(1).run(run)[0]
    except RankFailedError as error:
        cause = error.__cause__
        if isinstance(cause, NoReferenceError):
            raise cause from None
        raise NoReferenceError(
            f"one process fails, without the layout: {type(cause).__name__}: {cause}"
        ) from error


def compare(
    config: RunConfig, world: World, reference: Reference, *, steps: int
) -> list[Difference]:
    """Run the same steps as one rank of the layout; return every quantity's difference here."""
    engine, loader = prepared_engine(config, world)
    differences = []
    for step in range(steps):
        loss, _ = engine.backward(loader.batch(step))
        differences.append(_of_number(step, "loss", float(loss), reference.losses[step]))
        expected = reference.gradients[step]
        floor = _GRADIENT_FLOOR * _root_mean_square(expected.values())
        for name, parameter in engine.named_parameters():
            if name in expected:
                gradient = None if parameter.grad is None else whole(parameter.grad)
                relative = math.inf
                if gradient is not None:
                    relative = _relative(gradient, expected[name], floor=floor)
                differences.append(Difference(step + 1, "gradient", name, relative))
        norm, wanted_norm = _number(engine.update()[0]), reference.norms[step]
        if norm is not None and wanted_norm is not None:
            differences.append(_of_number(step, "norm", norm, wanted_norm))
    for name, parameter in engine.named_parameters():
        relative = _relative(
            whole(parameter.detach()), reference.parameters[name], floor=_PARAMETER_FLOOR
        )
        differences.append(Difference(steps, "parameter", name, relative))
    return differences


def on_mock(config: RunConfig, steps: int) -> ParityResult:
    """Verify a layout whose ranks are threads of this process."""
    import_plugins(config.plugins)
    config = _with_smooth_updates(config)
    try:
        reference = alone(config, steps=steps)
    except NoReferenceError as error:
        return failed(config, steps, str(error))
    world = World.mock(num_ranks(config), timeout_s=config.launch.timeout_s)
    try:
        results = world.run(lambda member: compare(config, member, reference, steps=steps))
    except RankFailedError as error:
        return failed(config, steps, str(error))
    return judge(config, reference, [member for differences in results for member in differences])


def save_reference(config: RunConfig, steps: int, folder: str) -> ParityResult | None:
    """Run the one process for ``on_rank`` to compare with; return a verdict if it fails."""
    import_plugins(config.plugins)
    try:
        reference = alone(_with_smooth_updates(config), steps=steps)
    except NoReferenceError as error:
        return failed(config, steps, str(error))
    torch.save(dataclasses.asdict(reference), Path(folder) / _SAVED)
    return None


def verify_on_rank(config: RunConfig, steps: int, folder: str, rank: int) -> ParityResult | None:
    """Verify a layout as one of its real ranks; rank 0 judges.

    Args:
        config: Checked and resolved.
        steps: Optimizer steps.
        folder: Where the ranks meet and find what ``save_reference`` left.
        rank: Which rank this process is.
    """
    ranks = num_ranks(config)
    import_plugins(config.plugins)
    config = _with_smooth_updates(config)
    threads = config.launch.threads
    torch.set_num_threads(host.threads(ranks=ranks) if threads == "auto" else threads)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    place = local_place(rank, ranks)
    os.environ.update(place.variables())  # a user's model may look for them, as in training
    with World.join(
        place, backend=config.launch.backend, timeout_s=config.launch.timeout_s, store=store
    ) as world:
        reference = Reference(**torch.load(Path(folder) / _SAVED))
        own = compare(config, world, reference, steps=steps)
        gathered = all_gather_json([dataclasses.asdict(difference) for difference in own])
    if rank:
        return None
    of_all_ranks = [
        Difference(**difference) for differences in gathered for difference in differences
    ]
    return judge(config, reference, of_all_ranks)


def judge(
    config: RunConfig,
    reference: Reference,
    differences: list[Difference],
) -> ParityResult:
    """Decide whether rounding explains what all ranks found.

    Args:
        config: The layout's.
        reference: What one process computed.
        differences: What the ranks found.
    """
    tolerance = tolerance_of(config)
    differences = [*differences, *_missing(reference, differences)]
    passing = dict.fromkeys(_ORDER, tolerance) | {"norm": norm_tolerance(tolerance)}
    wrong = [
        difference
        for difference in differences
        if not difference.relative <= passing[difference.kind]
    ]
    wrong.sort(key=lambda difference: (difference.step, _ORDER.index(difference.kind)))
    worst = {
        kind: max(
            (difference for difference in differences if difference.kind == kind),
            key=_size,
            default=None,
        )
        for kind in _ORDER
    }
    names = [
        difference
        for difference in (worst["gradient"], worst["parameter"])
        if difference is not None
    ]
    return ParityResult(
        passed=not wrong,
        layout=layout_of(config),
        steps=len(reference.losses),
        tolerance=tolerance,
        max_loss_difference=_size(worst["loss"]),
        max_gradient_difference=_size(worst["gradient"]),
        max_norm_difference=_size(worst["norm"]),
        max_parameter_difference=_size(worst["parameter"]),
        worst_parameter=max(names, key=_size).name if names else None,
        losses=reference.losses,
        differences=list(dict.fromkeys(str(difference) for difference in wrong)),
    )


def _size(difference: Difference | None) -> float:
    return 0.0 if difference is None else difference.relative


def _missing(reference: Reference, differences: list[Difference]) -> Iterator[Difference]:
    """Yield the gradients that no rank has."""
    have = {
        (difference.step, difference.name)
        for difference in differences
        if difference.kind == "gradient"
    }
    for step, gradients in enumerate(reference.gradients, start=1):
        for name in gradients:
            if (step, name) not in have:
                yield Difference(step, "gradient", name, math.inf)


def prepared_engine(config: RunConfig, world: World) -> tuple[Engine, Loader]:
    """Build a rank's engine without dropout, with its initial weights, and its data."""
    layout = Layout.of(config, world_size=world.world_size)
    dataset = data.build_dataset(config.data, config.tokenizer)
    loader = rank_loader(config, dataset, layout=layout, rank=world.rank)
    engine = build_engine(config, world, sample=sample_inputs(dataset))
    load_initial_weights(engine, config.model, world=world)
    _drop_nothing(engine.modules)
    return engine, loader


def _in_one_process(config: RunConfig, *, micro_batch_size: int | Literal["auto"]) -> RunConfig:
    alone = StrategyConfig(data_parallel="none")
    plain = {"train.micro_batch_size": micro_batch_size, "train.loss_chunk": None}
    return with_values(config, {"strategy": alone, **plain})


def _mixes_samples(modules: Iterable[nn.Module]) -> bool:
    """Say whether a sample's output depends on what else is in its micro-batch."""
    return any(isinstance(part, _BatchNorm) for whole in modules for part in whole.modules())


def _drop_nothing(modules: Iterable[nn.Module]) -> None:
    """Turn dropout off: every layout draws it for other elements."""
    for module in (part for whole_module in modules for part in whole_module.modules()):
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            # What a module hands to functional.dropout: MultiheadAttention's dropout, and others'.
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _has_drawn() -> bool:
    """Return whether a random number was drawn on the CPU since the generator was seeded."""
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    return not torch.equal(fresh.get_state(), torch.get_rng_state())


def _with_smooth_updates(config: RunConfig) -> RunConfig:
    """Return a run whose updates don't jump where a gradient is nothing but rounding."""
    optimizer, eps = config.optimizer, getattr(config.optimizer, "eps", None)
    if isinstance(optimizer, MuonConfig):
        # Its iteration multiplies what is small by 3.4445 each time, and rounds to bf16 before it:
        # five of them make 1e-3 of a gradient's last bit.
        eps = max(optimizer.adamw_eps, _LEAST_EPS)
        return with_values(config, {"optimizer.adamw_eps": eps, "optimizer.ns_steps": 1})
    if isinstance(eps, tuple):  # Adafactor's: of squares, and of parameters' sizes
        return with_values(config, {"optimizer.eps": (max(eps[0] or 0, _LEAST_EPS), *eps[1:])})
    if isinstance(eps, float):
        return with_values(config, {"optimizer.eps": max(eps, _LEAST_EPS)})
    return config


def _of_number(step: int, kind: str, seen: float, expected: float) -> Difference:
    relative = abs(seen - expected) / max(abs(expected), 1e-12)
    relative = relative if math.isfinite(relative) else math.inf
    return Difference(step + 1, kind, "", relative, seen, expected)


def _relative(seen: Tensor, expected: Tensor, *, floor: float) -> float:
    if seen.shape != expected.shape:
        return math.inf
    size = float(expected.double().norm()) + floor * math.sqrt(expected.numel())
    distance = float((seen.cpu().double() - expected.cpu().double()).norm())
    return distance / max(size, 1e-300) if math.isfinite(distance) else math.inf


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += float(tensor.double().square().sum())
        count += tensor.numel()
    return math.sqrt(squares / max(1, count))


def _number(tensor: Tensor | None) -> float | None:
    return None if tensor is None else float(tensor)
