"""Settings of a small mixture of experts, and layouts that divide it."""

from __future__ import annotations

RATE, WEIGHT = 0.01, 0.5
SETTINGS = [
    *("model=moe_debug", "model.hidden_size=32", "model.num_attention_heads=4"),
    *("model.moe_intermediate_size=16", "model.intermediate_size=48", "model.vocab_size=64"),
    *("model.first_k_dense_replace=1", "model.qk_norm=true", f"model.balance_rate={RATE}"),
    f"model.router_aux_loss={WEIGHT}",
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=16"),
    *("train.global_batch_size=8", "train.steps=10", "train.grad_clip=0.5"),
    *("scheduler=constant", "optimizer.lr=3e-3", "optimizer.eps=1e-6"),
    *("optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1"),
]
ZBV = "strategy.pipeline.schedule=zbv_zero_bubble"
TENSOR, PIPELINE, CONTEXT = (
    f"strategy.{axis}.degree=2" for axis in ("tensor", "pipeline", "context")
)
AXES = {
    "fsdp": ["strategy=fsdp"],
    "zero2": ["strategy=zero2"],
    "hsdp": ["strategy=hsdp", "strategy.fsdp.replicate=2"],
    "tensor": ["strategy=fsdp", TENSOR],
    "1f1b": ["strategy=fsdp", PIPELINE],
    "zbv": ["strategy=fsdp", PIPELINE, ZBV],
    "context": ["strategy=fsdp", CONTEXT],
    "all": ["strategy=fsdp", TENSOR, PIPELINE, CONTEXT],
}


def ranks_of(axis: str, degree: int) -> int:
    """Return the fewest ranks with this expert degree; all axes together need 8."""
    if axis == "all":
        return 8
    return degree * (2 if axis in ("fsdp", "hsdp", "1f1b", "zbv") else 1)


EXPERTS = {
    f"{axis}-{degree}": [
        *chosen,
        f"strategy.expert.degree={degree}",
        f"launch.nproc={ranks_of(axis, degree)}",
    ]
    for axis, chosen in AXES.items()
    for degree in (2, 4)
}
OTHERS = {
    "single": ["strategy=single", "launch.nproc=1", "train.micro_batch_size=2"],
    "ddp": ["strategy=ddp", "launch.nproc=2"],
    "zero1": ["strategy=zero1", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=2", "train.micro_batch_size=2"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "1f1b": ["strategy=pipeline", "launch.nproc=2"],
    "zbv": ["strategy=pipeline", "launch.nproc=2", ZBV],
    "context": ["strategy=fsdp", CONTEXT, "launch.nproc=2"],
    "hybrid": ["strategy=hybrid", "launch.nproc=8"],
    "full": [*("strategy=fsdp", "launch.nproc=2"), "train.activation_checkpointing=full"],
    "selective": [*("strategy=ddp", "launch.nproc=2"), "train.activation_checkpointing=selective"],
    "experts-full": [
        *("strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=2"),
        *("train.activation_checkpointing=full", "train.micro_batch_size=2"),
    ],
}
LAYOUTS = {**EXPERTS, **OTHERS}
