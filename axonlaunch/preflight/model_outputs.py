"""Checks the outputs of custom models for one micro-batch on fake tensors, before a rank starts.

The outputs of included models follow from their configuration. Models that can't run on fake
tensors are not checked here; the estimate or the rank reports their errors with the code location.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.options.training_hooks import AccuracyConfig, metric_name
from axonlaunch.config.problems.errors import one_of, plain
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.datasets.dataset import Batch, Dataset, sample_inputs
from axonlaunch.engines.tensor.outputs.deferred_head import HeadLoss
from axonlaunch.engines.tensor.outputs.logits_recorder import LogitsUsedError
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.metrics import build_metrics
from axonlaunch.models.specs.model_spec import ModelOutputs, ModelSpec, not_a_tensor
from axonlaunch.models.tensors.initialization import materialize
from axonlaunch.models.torch_internals import UNTRACEABLE

_SAMPLES = 2
"""Samples in the micro-batch. Batch normalization does not accept a single sample."""
_TRIAL_OUTPUTS = 1 << 22
"""Largest number of random outputs with which metrics are tried."""


@dataclass(frozen=True)
class _Forward:
    """The result of one forward on fake tensors.

    Attributes:
        returned: Object that the model returned; tensors have no values.
        embeddings: Number of rows, by name, of each embedding that was applied to the inputs.
        logit_changes: Operations by which the model changed the logits of a deferred head.
    """

    returned: Any
    embeddings: dict[str, int]
    logit_changes: list[str]


def output_problems(
    model: nn.Module, spec: ModelSpec, dataset: Dataset, *, setting: str = ""
) -> Iterator[ConfigIssue]:
    """Yield the reasons why a model can't be trained on a dataset.

    The forward may fail, it may not return a tensor, or an embedding or the outputs may have fewer
    entries than the dataset has tokens or classes. Models that can't run without values pass.

    Args:
        model: Model on the meta device; it is not changed.
        spec: Specification of the model; its loss determines the required outputs.
        dataset: Dataset of the run; only the shape of samples and the number of classes are used.
        setting: Override that enlarges the model's vocabulary enough, named in the message; empty
            if there is none.
    """
    if spec.untraceable:
        return
    forward = _forward(spec.representative(model), sample_inputs(dataset))
    if isinstance(forward, Exception):
        if spec.runs_without_values and not isinstance(forward, UNTRACEABLE):
            reason = " ".join(str(forward).split())[:400]
            message = f"its forward fails with {type(forward).__name__}: {reason}"
            yield ConfigIssue("model", message)
        return
    returned = forward.returned
    outputs = returned.logits if isinstance(returned, ModelOutputs) else returned
    if not isinstance(outputs, Tensor):
        yield not_a_tensor(outputs)
        return
    needed, unit = dataset.num_classes, "tokens" if dataset.kind == "tokens" else "classes"
    sizes = {f"its embedding {name} has": rows for name, rows in forward.embeddings.items()}
    if spec.loss is cross_entropy_sum:
        if outputs.dim() < 2:
            shape = f"its forward returns a tensor of shape {[*outputs.shape]}"
            message = f"{shape}, not logits [..., {needed}], from which the run computes the loss"
            yield ConfigIssue("model", message)
            return
        sizes["its outputs have"] = outputs.shape[-1]
    if small := [f"{has} {size}" for has, size in sizes.items() if size < needed]:
        message = f"{', '.join(small)}, but the data has {needed} {unit}; use "
        message += setting or f"{needed} or more"
        yield ConfigIssue("model", message)


def loss_term_problems(train: TrainConfig, spec: ModelSpec) -> Iterator[ConfigIssue]:
    """Yield terms that are added to cross entropy if the loss is not cross entropy."""
    reason = ""
    if train.loss is not None:
        reason = f"it changes cross entropy, and the loss is train.loss={train.loss}"
    elif spec.loss is not cross_entropy_sum:
        reason = "it changes cross entropy, and the model has a custom loss"
    terms = {"label_smoothing": 0, "z_loss": 0, "dft": False, "eaft": 0}
    for key, off in terms.items() if reason else ():
        if value := getattr(train, key):
            yield ConfigIssue(f"train.{key}", f"{reason}; use {plain(off)}", value)


def with_accuracy(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Add the accuracy to the metrics of a classifier for which no metrics are configured."""
    has_classes = dataset.kind == "images" and dataset.info.float_targets is None
    is_classifier = has_classes and config.train.loss is None
    if config.metrics or not is_classifier or spec_for(config).loss is not cross_entropy_sum:
        return config
    return with_values(config, {"metrics": [AccuracyConfig()]})


def metric_problems(config: RunConfig, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield problems of metrics; those of users are tried with random outputs for two samples.

    Args:
        config: Configuration of the run, with the metrics of classifiers.
        dataset: Dataset of the run. Structured samples and custom losses are not tried, because the
            outputs of their models are unknown.
    """
    names = [metric_name(metric) for metric in config.metrics]
    for number, name in enumerate(names):
        if name in names[:number] or name == "loss":
            message = f"{name} is listed twice" if name != "loss" else "loss is always reported"
            yield ConfigIssue(f"metrics[{number}]", f"{message}; remove it", name)
    best = config.train.best_metric
    if best not in ("loss", *names):
        metric_names = one_of(["loss", *names])
        message = f"no metric of the run has this name; use {metric_names}, or add it to metrics"
        yield ConfigIssue("train.best_metric", message, best)
    try:
        metrics = build_metrics(config)
    except ConfigError as error:
        yield from error.problems
        return
    if all(metric.name == AccuracyConfig.name for metric in config.metrics):
        return
    batch = _trial_batch(config, dataset)
    if batch is None:
        return
    outputs = torch.rand(*batch["targets"].shape, max(1, dataset.num_classes))
    for metric in metrics:
        try:
            metric.compute(metric.sums(outputs, batch).tolist())
        except ConfigError as error:
            yield from error.problems
        except Exception as error:  # user code may fail in any way
            yield ConfigIssue.of_failure(metric.key, "computing it", error, metric.name)


def _trial_batch(config: RunConfig, dataset: Dataset) -> dict[str, Tensor] | None:
    """Return two training samples, shortened if their outputs would be large; None if unknown."""
    if dataset.kind == "structured" or config.train.loss is not None or not dataset.num_samples:
        return None
    try:
        batch = dataset.samples(np.arange(min(_SAMPLES, dataset.num_samples)), split="train")
    except Exception:  # user code may fail in any way; the rank names the sample
        return None
    if not isinstance(batch, Batch) or batch.targets.is_floating_point():
        return None
    if dataset.kind == "tokens":
        length = max(1, _TRIAL_OUTPUTS // (_SAMPLES * max(1, dataset.num_classes)))
        batch = batch.map(lambda tensor: tensor[:, :length])
    return batch.full


def head_problems(
    model: nn.Module, spec: ModelSpec, dataset: Dataset, *, train: TrainConfig
) -> Iterator[ConfigIssue]:
    """Yield the reasons why a model's loss can't be computed without all of its logits.

    Args:
        model: Model on the meta device; it is not changed.
        spec: Specification of the model, which names its head.
        dataset: Dataset of the run; only the shape of samples is used.
        train: Training options, with ``loss_chunk`` or ``loss_kernel``.
    """
    reason = ""
    key = "loss_chunk" if train.loss_kernel is None else "loss_kernel"
    if spec.loss is not cross_entropy_sum:
        reason = "the model has a custom loss"
    elif spec.head is None or spec.head_of(model) is None:
        reason = "the module that computes the model's logits is not known"
    elif spec.untraceable:
        reason = spec.untraceable
    else:
        forward = _forward(spec.representative(model), sample_inputs(dataset), head=spec.head)
        if isinstance(forward, LogitsUsedError):
            reason = f"{forward} after {spec.head}, which needs all of them"
        elif isinstance(forward, Exception):
            text = " ".join(str(forward).split())[:200]
            reason = f"the model can't be run without values: {text}"
        elif train.loss_kernel is not None:
            reason = _kernel_problem(spec.head, spec.head_of(model), forward.logit_changes)
    if reason:
        yield ConfigIssue(f"train.{key}", f"{reason}; use null", getattr(train, key))


def _kernel_problem(name: str, head: nn.Module | None, changes: list[str]) -> str:
    """Return why a kernel can't compute a head together with the loss; empty if it can."""
    if type(head) is not nn.Linear:
        return f"{name} is a {type(head).__name__}, and the kernel needs a plain nn.Linear"
    if changes:
        operations = ", ".join(dict.fromkeys(changes))
        return f"the model changes its logits after {name} ({operations}), and the kernel does not"
    return ""


def _forward(model: nn.Module, sample: Tensor, *, head: str | None = None) -> _Forward | Exception:
    """Run a copy of the model on fake tensors; return the result or the exception."""
    silence_fake_tensors()
    try:
        model = copy.deepcopy(model)
        with _silence(), torch.no_grad(), fake_tensor_mode():
            materialize(model, device="cpu")
            inputs = torch.empty((_SAMPLES, *sample.shape), dtype=sample.dtype)
            deferred = None
            if head is not None:
                deferred = HeadLoss().defer(model.get_submodule(head), model)
            with _Lookups(model, inputs.untyped_storage()) as lookups:
                returned = model(inputs)
            changes = [] if deferred is None else deferred.changes_of_logits()
            return _Forward(returned, lookups.rows, changes)
    except Exception as error:  # custom models may fail in any way without values
        return error


class _Lookups(TorchFunctionMode):
    """Records the embeddings that are applied to the inputs or to views of them.

    Embeddings of other indices, such as positions, may have any size and are not recorded.

    Attributes:
        rows: Number of rows of each embedding, by name.
    """

    def __init__(self, model: nn.Module, inputs: torch.UntypedStorage) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}
        self._inputs = inputs
        self._names = {
            id(module.weight): name
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and isinstance(args[0], Tensor):
            name = self._names.get(id(args[1]))
            if name is not None and args[0].untyped_storage() is self._inputs:
                self.rows[name] = len(args[1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress output and warnings of the model, because its ranks repeat them."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
