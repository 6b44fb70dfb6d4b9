"""Lists every kind of layout under which an optimizer works, with its number of ranks."""

from __future__ import annotations

TENSOR = "strategy.tensor.degree=2"
LAYOUTS = {
    "single": (1, "strategy=single"),
    "ddp": (2, "strategy=ddp"),
    "zero1": (2, "strategy=zero1"),
    "zero2": (2, "strategy=zero2"),
    "fsdp": (2, "strategy=fsdp"),
    "hsdp": (4, "strategy=hsdp strategy.fsdp.replicate=2"),
    "parameters offloaded": (2, "strategy=fsdp strategy.fsdp.cpu_offload=params"),
    "states offloaded": (2, "strategy=fsdp strategy.fsdp.cpu_offload=optimizer_states"),
    "all offloaded": (2, "strategy=fsdp strategy.fsdp.cpu_offload=full"),
    "tensor": (2, "strategy=tensor"),
    "zero1 x tensor": (4, f"strategy=zero1 {TENSOR}"),
    "fsdp x tensor": (4, f"strategy=fsdp {TENSOR}"),
    "pipeline": (2, "strategy=pipeline train.micro_batch_size=4"),
}
