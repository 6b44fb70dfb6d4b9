"""What one process computes, step by step: what layouts are held against."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the reference.

    Attributes:
        loss: Mean over the counted targets.
        counted: How many they are.
        rate: The learning rate.
        norm: Of the whole gradient before clipping.
        skipped: fp16: the update was left out.
        scale: fp16: what the next step's loss is multiplied by; 1 in others.
        gradients: By parameter's name, before clipping; fp16's are multiplied by the loss scale.
    """

    loss: float
    counted: float
    rate: float
    norm: float
    skipped: bool
    scale: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What one process computes.

    Attributes:
        steps: One after another.
        start: Parameters before the first step, by name.
        parameters: After the step that is saved, by name.
        buffers: Persistent ones, then.
        states: Of the optimizers then, ``<parameter>.<state>``.
        end: Parameters after the last step.
        evaluation: Mean loss and counted targets of ``inputs.evaluated_samples``, halfway.
        prediction: Outputs for ``inputs.predicted_samples`` of them, then.
        end_evaluation: Mean loss and counted targets of held-out samples after the last step.
        frozen: Names of parameters that are not trained.
        dropout: Largest rate of dropout in the model, which is off here.
        saved_step: Steps before the state that is saved.
        halfway: Steps before the evaluation.
        masks: That a forward in training draws with dropout on.
        tables: Buffers that are not saved, at the start, by name.
        reads_again: Whether a forward may read a parameter again, after others.
    """

    steps: list[ReferenceStep]
    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    states: dict[str, Tensor]
    end: dict[str, Tensor]
    evaluation: tuple[float, float] | None = None
    prediction: Tensor | None = None
    end_evaluation: tuple[float, float] | None = None
    frozen: tuple[str, ...] = ()
    dropout: float = 0.0
    saved_step: int = 0
    halfway: int = 0
    masks: int = 0
    tables: dict[str, Tensor] = field(default_factory=dict)
    reads_again: bool = False
