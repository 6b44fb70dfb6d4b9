"""Names that other tools and earlier versions have for keys and options, to those of here.

It holds tables; who meets an unknown name looks it up.
"""

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
"""What other tools call an option, to what it is here."""

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
    "output_dir": "run_dir",
    "pipeline_parallel_size": "strategy.pipeline.degree",
    "pp": "strategy.pipeline.degree",
    "tensor_parallel_size": "strategy.tensor.degree",
    "target_modules": "adapter.targets",
    "target_parameters": "adapter.targets",
    "tp": "strategy.tensor.degree",
    "use_dora": "adapter.dora",
    "use_rslora": "adapter.rslora",
}
"""What other tools call a key, to the key that it is here."""

_NO_QUANTISED_BASE = (
    "a quantised base (QLoRA) is not supported: in 4 bits torchao gives other weights where a "
    "layout cuts them, and can't cut them by inputs; use adapter=lora train.precision=bf16 "
    "train.param_dtype=bf16"
)
UNSUPPORTED = {
    "adapter=qlora": _NO_QUANTISED_BASE,
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantize_base"), _NO_QUANTISED_BASE),
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_config"), _NO_QUANTISED_BASE),
}
"""What other tools have and this one lacks, an option or a key: why, and what to write instead."""

RENAMED_OPTIONS = {"--formula": "--analytic", "--picture": "--plot"}
"""Options of commands that had another name."""
RENAMED_KEYS = {
    "checkpoint.keep": "checkpoint.keep_last",
    "checkpoint.keep_every": "checkpoint.keep_every_n_steps",
    "hardware.attention_sustained": "hardware.attention_efficiency",
    "hardware.host_sustained": "hardware.host_efficiency",
    "hardware.link_gather_gb_s": "hardware.allgather_bw_gb_s",
    "hardware.link_sustained": "hardware.link_efficiency",
    "hardware.matrix_sustained": "hardware.matrix_efficiency",
    "hardware.memory_sustained": "hardware.memory_efficiency",
    "hardware.moved_bytes": "hardware.kernel_bytes",
    "hardware.moved_us": "hardware.kernel_latency_us",
    "hardware.network_sustained": "hardware.network_efficiency",
    "launch.account": "launch.slurm.account",
    "launch.partition": "launch.slurm.partition",
    "launch.sbatch": "launch.slurm.extra_args",
    "launch.setup": "launch.slurm.prologue",
    "launch.time_limit": "launch.slurm.time",
    "strategy.planned": "strategy.auto",
    "train.prompt": "sample.prompt",
    "train.sample_tokens": "sample.max_new_tokens",
    "train.tensorboard": "loggers=[tensorboard]",
}
"""What an earlier version called a key, to the key that it is now."""
