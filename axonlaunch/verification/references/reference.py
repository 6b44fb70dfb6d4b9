"""Trains a run in one process with plain torch, as the reference for layouts.

Uses the module, its loss, ``torch.optim``, torch's clipping, the schedule's formula and
``torch.amp``. Imports nothing from ``engines``: a comparison cannot find errors in shared code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from axonlaunch import data
from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.precision import (
    QuantizedFormat,
    quantizes_states,
    state_format,
    update_format,
)
from axonlaunch.config.values.optional_keys import balances_by_bias
from axonlaunch.data.datasets.dataset import AnyBatch, Batch, MicroBatch
from axonlaunch.data.datasets.loader import full_loader
from axonlaunch.data.datasets.samples import map_tensors
from axonlaunch.models.adapters.lora import start_magnitudes
from axonlaunch.models.adapters.quantized_base import quantized_names
from axonlaunch.models.build import build_model, on_meta, spec_for
from axonlaunch.models.facts.scaled_layers import scaled_layers
from axonlaunch.models.modules.module_state import evaluating
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.custom_loss import CustomLoss, build_custom_loss
from axonlaunch.models.specs.model_spec import ModelOutputs, not_a_tensor
from axonlaunch.models.torch_dtypes import torch_dtype
from axonlaunch.verification.decisions.chosen_experts import ChosenExperts
from axonlaunch.verification.decisions.random_draws import MaskRecorder
from axonlaunch.verification.references import comparison_inputs, data_checks, plain_model
from axonlaunch.verification.references.comparison_plan import (
    EVALUATED_BATCHES,
    FIRST_SCALE,
    ComparisonPlan,
)
from axonlaunch.verification.references.lookahead import lookahead_problem
from axonlaunch.verification.references.plain_model import (
    LoadableWeights,
    PlainBalance,
    clone_buffers,
    loss_sum,
    moves_buffers,
    plain_quantized,
    reference_device,
    restore_buffers,
    saved_buffers,
)
from axonlaunch.verification.references.plain_optimizer import (
    PEAK,
    clip,
    plain_optimizers,
    plain_rate,
)
from axonlaunch.verification.references.plain_rounding import (
    is_like_parameter,
    quantize_states,
    round_factors,
    round_states,
    without_rounded_factors,
)
from axonlaunch.verification.references.reference_values import Reference, ReferenceStep


class NoReferenceError(Exception):
    """The reference cannot be computed, or shows a fault that is independent of the layout."""


def _refuse(problem: str) -> None:
    if problem:
        raise NoReferenceError(problem)


class PlainRun:
    """A model and its optimizers in one process, as in a plain script.

    Computes on a GPU if the layout's ranks do, because matrix products and attention round
    differently on GPUs and CPUs. Results are in host memory.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: ComparisonPlan,
        *,
        roughness: float = 0.0,
        draw: int = 0,
        choices: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        """Build the model and its optimizers.

        Args:
            config: Configuration of the layout.
            plan: Length and scope of the comparison.
            roughness: Relative size of a perturbation of the initial weights.
            draw: Number of the perturbation.
            choices: Experts that routers choose in each step, instead of the best ones.
        """
        self._config, self._plan = config, plan
        # The first run has already checked the data of runs with perturbed weights.
        self._checks_data = not roughness
        self._spec = spec_for(config)
        self._layout = Layout.of(config, world_size=num_ranks(config))
        dataset = data.build_dataset(config.data, config.tokenizer)
        self._loader = full_loader(config, dataset)
        self._custom_loss = build_custom_loss(config.train)
        self._precision = precision_of(config)
        self._dtype = torch.float64 if plan.fp64 else torch_dtype(self._precision.reference)
        self._device = reference_device(config)
        self._quantized: dict[str, Tensor] = {}
        self.model = self._build_model().to(self._device)
        comparison_inputs.move_vectors(self.model.named_parameters())
        self._spec.use_plain_experts(self.model)
        layers: dict[str, nn.Module] = {}
        if self._precision.products is not None:
            layers = scaled_layers(config, self._spec, self.model)
            round_factors(layers.values(), self._precision.products)
        self._num_experts = self._spec.most_experts(self.model)
        self._chosen = ChosenExperts(self._spec, [self.model], num_experts=self._num_experts)
        self._choices = choices
        self._dropout = comparison_inputs.Dropout([self.model])
        self._masks, self._reads_again = 0, False
        self._parameters = dict(self.model.named_parameters())
        self._trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        self._updated: dict[str, Tensor] = {}
        self._start = self.copy_parameters()
        saved, buffers = saved_buffers(self.model), dict(self.model.named_buffers())
        self._unsaved_buffers = _copies({n: b for n, b in buffers.items() if n not in saved})
        if roughness:
            # The largest weight of a group is in the middle between two integers, so that a
            # perturbation rounds it otherwise. In the first step of a layout, no weight differs.
            is_exact = isinstance(self._precision.products, QuantizedFormat)
            exact = {f"{name}.weight" for name in layers} if is_exact else set()
            rough = {n: p for n, p in self._parameters.items() if n not in exact}
            comparison_inputs.roughen(rough, relative=roughness, draw=draw)
        self._updated = self._tensors_to_update()
        stored = state_format(config.optimizer)
        self._rounds_states = stored is not None and stored.is_low and not plan.fp64
        self._quantizes_states = quantizes_states(config.optimizer) and not plan.fp64
        self._optimizers = plain_optimizers(config.optimizer, self._spec, self.model, self._updated)
        is_scaled = self._precision.needs_loss_scale
        self._scaler = torch.amp.GradScaler(
            self._device.type,
            init_scale=FIRST_SCALE,
            growth_interval=plan.growth_interval,
            enabled=is_scaled,
        )
        # Before data ranks average their gradients, these are larger by the number of ranks, which
        # determines whether fp16 overflows.
        self._ranks = self._layout.gradient_ranks if is_scaled else 1
        described: Any = config.model
        self._balance = None
        if balances_by_bias(described):
            experts, rate = self._spec.experts(self.model), described.balance_rate
            self._balance = PlainBalance(self.model, experts, rate=rate)

    def _build_model(self) -> nn.Module:
        base = None if self._config.adapter is None else self._config.adapter.base
        config = self._config if base is None else with_values(self._config, {"adapter.base": None})
        formats = quantized_names(on_meta(self._config, seed=config.seed))
        model = build_model(config, seed=config.seed)
        if self._plan.fp64:
            model.double()
        elif self._precision.parameters.is_low:
            dtype = torch_dtype(self._precision.parameters)
            for name, parameter in model.named_parameters():
                # The trained parameters of an adapter stay in fp32. Others are quantized from fp32.
                is_trained = config.adapter is not None and parameter.requires_grad
                is_kept = is_trained or name in formats
                if parameter.is_floating_point() and not is_kept:
                    parameter.data = parameter.data.to(dtype)
                if self._has_masters and parameter.requires_grad:
                    parameter.data = parameter.data.float()
        if self._spec.initializers is not None:
            start_magnitudes(model)  # from the weights in param_dtype
        if source_of(config).initial_weights() is not None:
            World.mock(1).run(
                lambda world: load_initial_weights(LoadableWeights(model), config, world=world)
            )
        for name in formats:
            parameter = model.get_parameter(name)
            values, self._quantized[name] = plain_quantized(parameter.float(), formats[name].name)
            parameter.data.copy_(values)
        if formats and config.adapter is not None and config.adapter.path is None:
            start_magnitudes(model)
        return model if model.training else model.train()  # keeps submodules in evaluation mode

    @property
    def _has_masters(self) -> bool:
        """Whether parameters in 16 bits are rounded masters; in fp64 nothing is rounded."""
        return self._precision.masters is not None and not self._plan.fp64

    def _tensors_to_update(self) -> dict[str, Tensor]:
        """Return the parameters, or copies in the format of the update.

        Masters begin as the parameters, which are rounded then.
        """
        chosen = update_format(self._config.optimizer)
        is_low = self._precision.parameters.is_low and self._config.adapter is None
        if chosen is None or not is_low or self._plan.fp64:
            return dict(self._trained)
        dtype, lower = torch_dtype(chosen), torch_dtype(self._precision.parameters)
        copies = {n: p.detach().to(dtype).clone() for n, p in self._trained.items()}
        for parameter in self._trained.values():
            parameter.data = parameter.data.to(lower)
            parameter.grad_dtype = torch_dtype(self._precision.gradients)
        return copies

    def refuse_problems(self) -> None:
        """Check for faults that the reference and every layout share.

        Raises:
            NoReferenceError: Samples are random or in a wrong order, or tied weights are separate.
        """
        seed, loader = self._config.seed, self._loader
        _refuse(data_checks.order_problem(loader, seed=seed) or data_checks.random_problem(loader))
        built = {name for name, _ in on_meta(self._config, seed=seed).named_parameters()}
        if untied := [name for name in self._parameters if name not in built]:
            raise NoReferenceError(f"the model: {untied[0]} is no longer the weight it was tied to")

    def run(self) -> Reference:
        """Run every step.

        Raises:
            NoReferenceError: A check of the data or of the model in a step fails.
        """
        steps: list[ReferenceStep] = []
        evaluation, prediction, saved = None, None, self._state()
        for number in range(self._plan.steps):
            if self._plan.beyond and number == self._plan.halfway:
                with self._rounding(number):
                    evaluation, prediction = self._evaluate()
            steps.append(self.step(number))
            if number + 1 == self._plan.saved:
                saved = self._state()
        end = self.copy_parameters()
        return Reference(
            steps,
            self._start,
            *saved,
            end,
            *(evaluation, prediction),
            self._end_evaluation(),
            tuple(name for name in self._parameters if name not in self._trained),
            self._dropout.largest,
            self._plan.saved,
            self._plan.halfway,
            self._masks,
            self._unsaved_buffers,
            self._reads_again,
            self._num_experts,
        )

    @torch.no_grad()
    def _lookahead(self, batch: AnyBatch) -> str:
        """Describe a forbidden dependence of outputs on tokens, or return an empty string."""
        if not isinstance(batch, Batch):
            return ""

        def outputs_of(sample: Batch) -> Tensor:
            outputs: Tensor | ModelOutputs = self._outputs(sample)
            return outputs if isinstance(outputs, Tensor) else outputs.logits

        with without_rounded_factors(self.model):  # tokens of a micro-batch share scales
            return lookahead_problem(self.model, batch, outputs_of)

    def step(self, number: int) -> ReferenceStep:
        """Run forward and backward of every micro-batch, then clip and update."""
        config = self._config
        batch = self._batch(number)
        if not number and self._dropout.largest:
            self._masks = self._num_masks(batch)
        counted = self._count(batch)
        if self._balance is not None:
            self._balance.begin_step()
        watch = nullcontext() if number else plain_model.counting_calls(self.model)
        with watch as calls:
            total, gradients = self._backward(batch, number, seed=config.seed + number)
        if calls is not None:
            self._reads_again = plain_model.rereads_parameters(self.model, calls)
        if self._scaler.is_enabled() and number == self._plan.overflow:
            comparison_inputs.overflow(self._trained[next(iter(gradients))])
        rate = plain_rate(
            config.scheduler, number, peak=config.optimizer.lr, steps=config.train.num_steps
        )
        norm, skipped = self._update(number)
        if self._balance is not None and not skipped:
            self._balance.move()
        scale = float(self._scaler.get_scale())
        choices = self._chosen.choices()
        return ReferenceStep(total, counted, rate, norm, skipped, scale, gradients, choices)

    def first_gradients(self, *, seed: int) -> tuple[float, dict[str, Tensor]]:
        """Return loss and gradients of the first step without an update.

        Args:
            seed: Seed of the random numbers that the model draws.
        """
        batch, buffers = self._batch(0), clone_buffers(self.model)
        results = self._backward(batch, 0, seed=seed)
        restore_buffers(self.model, buffers)
        for parameter in self._trained.values():
            parameter.grad = None
        return results

    def _backward(
        self, batch: AnyBatch, number: int, *, seed: int
    ) -> tuple[float, dict[str, Tensor]]:
        """Run forward and backward of a step; return the mean loss and copies of the gradients."""
        torch.manual_seed(seed)
        total, counted = 0.0, self._count(batch)
        self._chosen.begin(self._choices[number] if self._choices else {})
        chosen = self._chosen if self._num_experts else nullcontext()
        means = plain_model.RankMeans(self._trained.values(), ranks=self._ranks)
        with self._rounding(number), chosen:
            for piece in self._pieces(batch):
                loss = self._loss_sum(piece, training=True) / max(1, counted)
                self._scaler.scale(loss * self._ranks).backward()
                means.add_gradients()
                total += float(loss.detach())
        means.replace_gradients()
        gradients = {n: p.grad for n, p in self._trained.items() if p.grad is not None}
        return total, _copies(gradients)

    def _batch(self, number: int) -> AnyBatch:
        """Return a step's global batch with masked targets.

        Raises:
            NoReferenceError: A check of the data failed, or outputs depend on later tokens.
        """
        batch = self._loader.batch(number)
        if self._checks_data:
            _refuse(data_checks.data_problem(self._config.data, self._loader, batch, step=number))
            _refuse("" if number else self._lookahead(batch))
        return comparison_inputs.make_uneven(batch, step=number, custom_loss=self._custom_loss)

    @torch.no_grad()
    def _num_masks(self, batch: AnyBatch) -> int:
        """Count the masks that a forward in training draws with dropout on."""
        recorder, buffers = MaskRecorder([], rank=0), clone_buffers(self.model)
        first = next(plain_model.micro_batches_of(batch, self._layout.micro_batch_size))
        with torch.random.fork_rng(devices=[]), self._dropout.on(), recorder:
            self._outputs(first)
        restore_buffers(self.model, buffers)
        return len(recorder.draws)

    def _update(self, number: int) -> tuple[float, bool]:
        """Clip and update; return the gradient norm and whether fp16 skipped the update."""
        config = self._config
        for name, parameter in self._updated.items():
            gradient = self._trained[name].grad
            if parameter is not self._trained[name]:
                if not self._has_masters:
                    parameter.copy_(self._trained[name].detach())
                parameter.grad = None if gradient is None else gradient.float()
        updated = [tensor for tensor in self._updated.values() if tensor.grad is not None]
        if updated:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        norm = clip(updated, config.train.grad_clip)
        skipped = self._scaler.is_enabled() and not math.isfinite(norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plain_rate(
                    config.scheduler, number, peak=group[PEAK], steps=config.train.num_steps
                )
            if not skipped:
                optimizer.step()
                if self._rounds_states:
                    round_states(optimizer, self._names(), seed=config.seed, step=number + 1)
                if self._quantizes_states:
                    quantize_states(optimizer)
        if updated:
            self._scaler.update()
        with torch.no_grad():
            for name, master in self._updated.items():
                if master is not self._trained[name]:
                    self._trained[name].copy_(master)
                master.grad = self._trained[name].grad = None
        return norm, skipped

    def _pieces(self, batch: AnyBatch) -> Iterator[MicroBatch]:
        """Yield the whole batch, or the layout's micro-batches if results depend on their size.

        The micro-batches of each data rank update the buffers from the same initial values. The
        buffers of the first rank are kept, as in a layout.
        """
        mixed, is_fp32 = self._spec.mixes_samples, self._dtype in (torch.float32, torch.float64)
        is_fp32 = is_fp32 and self._precision.products is None  # scales differ
        is_independent = is_fp32 and mixed == "none" and not moves_buffers(self.model)
        is_independent = is_independent and self._custom_loss is None
        if isinstance(batch, Batch) and (is_independent or mixed == "batch"):
            yield batch
            return
        if mixed == "batch":
            message = "the loss of routers is not compared on samples of any structure; use false"
            raise NoReferenceError(f"model.router_aux_loss: {message}")
        size, share = self._layout.micro_batch_size, len(batch) // self._layout.data_ranks
        start, first = clone_buffers(self.model), None
        for number, piece in enumerate(plain_model.micro_batches_of(batch, size)):
            if number and number * size % share == 0:
                first = first or clone_buffers(self.model)
                restore_buffers(self.model, start)
            yield piece
        if first is not None:
            restore_buffers(self.model, first)

    def _loss_sum(self, batch: MicroBatch, *, training: bool) -> Tensor:
        batch = plain_model.map_batch(batch, self._to_device)
        outputs, auxiliary = self._outputs(batch), 0.0
        is_custom = self._custom_loss is not None
        if self._spec.mixes_samples == "batch" and (is_custom or not training):
            # Evaluations leave out the routers' loss of the global batch.
            assert isinstance(batch, Batch)
            auxiliary = outputs.auxiliary_loss * self._count(batch) if training else 0.0
            outputs = outputs.logits
        if self._custom_loss is None:
            assert isinstance(batch, Batch)
            train = self._config.train
            return loss_sum(
                self._spec,
                outputs,
                batch.targets,
                label_smoothing=train.label_smoothing if training else 0.0,
                z_loss=train.z_loss if training else 0.0,
                dft=train.dft and training,
                eaft=train.eaft if training else 0.0,
            )
        if self._spec.mixes_samples != "batch":
            return self._custom_sum(self._custom_loss, outputs, batch)
        # A custom loss may depend on other samples of its micro-batch, also if the forward had all.
        assert isinstance(batch, Batch)
        size = self._layout.micro_batch_size
        pieces = [*plain_model.micro_batches_of(batch, size)]
        parts = outputs.split(size)[: len(pieces)]
        sums = [
            self._custom_sum(self._custom_loss, part[: piece.num_samples], piece)
            for part, piece in zip(parts, pieces, strict=True)
        ]
        return torch.stack(sums).sum() + auxiliary

    def _custom_sum(self, loss: CustomLoss, outputs: Any, batch: MicroBatch) -> Tensor:
        total = loss.sum(outputs, plain_model.loss_argument(batch))
        return total if batch.is_counted else total * 0

    def _count(self, batch: AnyBatch) -> int:
        size = self._layout.micro_batch_size
        return plain_model.loss_divisor(self._custom_loss, batch, micro_batch_size=size)

    def _outputs(self, batch: MicroBatch) -> Any:
        """Run the forward in the run's precision.

        In lower precision the complete model is cast, except that replicas may compute under
        autocast (``Precision.replica_arithmetic``).
        """
        dtype = self._dtype
        is_gathered = self._layout.facts.shards_parameters

        def cast_tensor(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        batch = plain_model.map_batch(batch, self._to_device)
        arguments, keywords = plain_model.forward_arguments(self.model, batch)
        if self._balance is not None:
            self._balance.present = batch.present if isinstance(batch, Batch) else None
        if dtype is torch.float64:
            arguments, keywords = map_tensors(cast_tensor, (arguments, keywords))
        if dtype in (torch.float32, torch.float64):
            outputs = self.model(*arguments, **keywords)
        elif is_gathered or self._precision.replica_arithmetic != "autocast":
            cast = plain_model.cast_parameters(self.model, dtype, is_gathered=is_gathered)
            arguments, keywords = map_tensors(cast_tensor, (arguments, keywords))
            outputs = functional_call(self.model, cast, tuple(arguments), keywords)
        else:
            with torch.autocast(self._device.type, dtype=dtype):
                outputs = self.model(*arguments, **keywords)
        if self._custom_loss is None and not isinstance(outputs, Tensor | ModelOutputs):
            raise NoReferenceError(str(not_a_tensor(outputs)))
        return outputs

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    @torch.no_grad()
    def _evaluate(self) -> tuple[tuple[float, float] | None, Tensor | None]:
        """Return mean loss and counted targets of held-out samples, and outputs for a few."""
        batches = [
            *self._loader.eval_batches(part=comparison_inputs.evaluated_samples(self._loader))
        ]
        if not batches:
            return None, None
        if self._checks_data:
            _refuse(data_checks.held_out_problem(self._config.data, self._loader, batches))
        uneven = [
            comparison_inputs.make_uneven(b, step=n, custom_loss=self._custom_loss)
            for n, b in enumerate(batches)
        ]
        with evaluating([self.model]):
            evaluation, logits = self._mean_loss(uneven), None
            if self._custom_loss is None:
                first = batches[0]
                assert isinstance(first, Batch)
                samples = comparison_inputs.predicted_samples(self._config, first)
                outputs = self._outputs(Batch(samples, first.targets[: len(samples)]))
                logits = _copy(outputs if isinstance(outputs, Tensor) else outputs.logits)
        return evaluation, logits

    @torch.no_grad()
    def _end_evaluation(self) -> tuple[float, float] | None:
        """Return mean loss and counted targets of the training loop's last evaluation."""
        if not self._plan.trains_on or not self._loader.dataset.num_eval_samples:
            return None
        parts = self._loader.dataset.info.eval_parts
        batches: list[AnyBatch] = []
        for part in parts.values() or [None]:
            part_batches = [*self._loader.eval_batches(EVALUATED_BATCHES, part=part)]
            if self._checks_data:
                _refuse(data_checks.part_problem(self._loader, part, part_batches))
            batches += part_batches
        with evaluating([self.model]), self._rounding(self._plan.steps):
            return self._mean_loss(batches)

    def _rounding(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which products are those of a step."""
        is_on = number >= self._config.train.matmul_start_step
        return nullcontext() if is_on else without_rounded_factors(self.model)

    def _mean_loss(self, batches: Iterable[AnyBatch]) -> tuple[float, float]:
        """Return the mean loss over counted targets, and their number."""
        total, counted = 0.0, 0.0
        for batch in batches:
            counted += self._count(batch)
            # Use the layout's micro-batch size, because some models mix samples.
            pieces = plain_model.micro_batches_of(batch, self._layout.micro_batch_size)
            total += sum(float(self._loss_sum(piece, training=False)) for piece in pieces)
        return total / max(1.0, counted), counted

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of parameters, persistent buffers and optimizer states."""
        names = self._names()
        states = {
            f"{names[id(p)]}.{key}": _copy(self._stored_state(key, torch.as_tensor(value), p))
            for optimizer in self._optimizers
            for p, values in optimizer.state.items()
            for key, value in values.items()
        }
        return self.copy_parameters(), _copies(saved_buffers(self.model)), states

    def _names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._updated.items()}

    def _stored_state(self, key: str, value: Tensor, parameter: Tensor) -> Tensor:
        is_rounded = self._rounds_states and is_like_parameter(key, value, parameter)
        return value.bfloat16() if is_rounded else value

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters as layouts save them.

        Masters represent their parameters, and quantized ones are uint8.
        """
        masters = self._updated if self._has_masters else {}
        return _copies({**self._parameters, **masters, **self._quantized})


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
