"""Tables of other tools' names for keys and options, for hints when a name is unknown."""

from __future__ import annotations

FOREIGN_OPTIONS = {
    "adapter=dora": "adapter=lora adapter.dora=true",
    "adapter=rslora": "adapter=lora adapter.rslora=true",
    "strategy=context_parallel": "strategy.context.degree=2",
    "strategy=data_parallel": "ddp",
    "strategy=deepspeed": "zero1, zero2 or fsdp",
    "strategy=dp": "ddp",
    "strategy=full_shard": "fsdp",
    "strategy=hybrid_shard": "hsdp",
    "strategy=none": "single",
    "strategy=pp": "pipeline",
    "strategy=shard_grad_op": "zero2",
    "strategy=tp": "tensor",
    "strategy=zero3": "fsdp",
}
"""Maps other tools' names of an option to the option here."""

FOREIGN_NAMES = {
    "batch": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "devices": "launch.nproc",
    "enable_async_tensor_parallel": "strategy.tensor.async_collectives",
    "epochs": "train.epochs",
    "gpus": "launch.nproc",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "gradient_checkpointing": "train.activation_checkpointing",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "max_epochs": "train.epochs",
    "max_grad_norm": "train.grad_clip",
    "max_steps": "train.steps",
    "mixed_precision": "train.precision",
    "nproc_per_node": "launch.nproc",
    "num_epochs": "train.epochs",
    "num_gpus": "launch.nproc",
    "num_processes": "launch.nproc",
    "messages_field": "data.fields={messages: NAME}",
    "output_dir": "run_dir",
    "pipeline_parallel_size": "strategy.pipeline.degree",
    "pp": "strategy.pipeline.degree",
    "prompt_template": "data.prompt_format",
    "tensor_parallel_size": "strategy.tensor.degree",
    "target_modules": "adapter.targets",
    "target_parameters": "adapter.targets",
    "tp": "strategy.tensor.degree",
    "use_dora": "adapter.dora",
    "use_rslora": "adapter.rslora",
}
"""Maps other tools' names of a key to the key here."""

_NO_QUANTISED_BASE = (
    "a quantised base (QLoRA) is not supported: torchao's 4-bit weights change when a layout cuts "
    "them, and it can't cut them by inputs; use adapter=lora train.precision=bf16 "
    "train.param_dtype=bf16"
)
UNSUPPORTED = {
    "adapter=qlora": _NO_QUANTISED_BASE,
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantize_base"), _NO_QUANTISED_BASE),
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_config"), _NO_QUANTISED_BASE),
}
"""Maps options and keys that are not supported to the reason and the alternative."""
