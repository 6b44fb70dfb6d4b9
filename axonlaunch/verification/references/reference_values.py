"""Values computed by the reference, which layouts are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the reference.

    Attributes:
        loss: Mean loss over the counted targets.
        counted: Number of counted targets.
        rate: Learning rate.
        norm: Norm of the full gradient before clipping.
        skipped: Whether fp16 skipped the update because of an overflow.
        scale: Loss scale of the next step; 1 except in fp16.
        gradients: Gradients by parameter name, before clipping; in fp16 multiplied by the loss
            scale.
        choices: Experts chosen by routers, see ``ChosenExperts.choices``.
    """

    loss: float
    counted: float
    rate: float
    norm: float
    skipped: bool
    scale: float
    gradients: dict[str, Tensor]
    choices: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Values of a run in one process.

    Attributes:
        steps: Values of each step.
        start: Parameters before the first step, by name.
        parameters: Parameters after step ``saved_step``, by name.
        buffers: Persistent buffers after step ``saved_step``, by name.
        states: Optimizer states after step ``saved_step``, by ``<parameter>.<state>``.
        end: Parameters after the last step, by name.
        evaluation: Mean loss and counted targets of ``comparison_inputs.evaluated_samples`` after
            ``halfway`` steps.
        prediction: Outputs for ``comparison_inputs.predicted_samples`` after ``halfway`` steps.
        end_evaluation: Mean loss and counted targets of held-out samples after the last step.
        frozen: Names of parameters that are not trained.
        dropout: Largest configured dropout rate; dropout is off in these values.
        saved_step: Number of steps before the checkpoint.
        halfway: Number of steps before the evaluation.
        masks: Number of masks that a forward in training draws with dropout on.
        unsaved_buffers: Initial values of non-persistent buffers, by name.
        rereads_parameters: Whether a forward may read a parameter again after reading others.
        num_experts: Largest number of experts of a layer; 0 without experts.
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
    unsaved_buffers: dict[str, Tensor] = field(default_factory=dict)
    rereads_parameters: bool = False
    num_experts: int = 0
