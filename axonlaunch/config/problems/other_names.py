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
    "accelerator": "launch.device",
    "accumulate_grad_batches": "train.global_batch_size",
    "activation_checkpoint.mode": "train.activation_checkpointing",
    "adapter.bias": "train.unfreeze=['*.bias']",
    "adapter.r": "adapter.rank",
    "adapter.target_modules": "adapter.targets",
    "batch": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "checkpoint.async_mode": "checkpoint.async_save",
    "checkpoint.folder": "checkpoint.path",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "compile.enable": "train.compile",
    "comm.init_timeout_seconds": "launch.timeout_s",
    "dataset": "data=chat or data=documents with data.files",
    "debug.deterministic": "train.deterministic",
    "debug.seed": "seed",
    "deepspeed_config.zero_stage": "strategy=zero1, zero2 or fsdp",
    "devices": "launch.nproc",
    "distributed_type": "strategy",
    "enable_async_tensor_parallel": "strategy.tensor.async_collectives",
    "fsdp_config.fsdp_sharding_strategy": "strategy.fsdp.sharding",
    "gpu_ids": "launch.nproc, and CUDA_VISIBLE_DEVICES",
    "gpus": "launch.nproc",
    "gradient_clip_val": "train.grad_clip",
    "gradient_clipping": "train.grad_clip",
    "job.dump_folder": "run_dir",
    "limit_val_batches": "train.eval_batches",
    "lr_scheduler.decay_ratio": "scheduler.decay_ratio",
    "lr_scheduler.decay_type": "scheduler",
    "lr_scheduler.min_lr_factor": "scheduler.final_lr_ratio",
    "lr_scheduler.warmup_steps": "scheduler.warmup_steps",
    "machine_rank": "launch.node_rank",
    "main_process_ip": "launch.master_addr",
    "main_process_port": "launch.master_port",
    "max_epochs": "train.epochs",
    "messages_field": "data.fields={messages: NAME}",
    "metrics.enable_tensorboard": "loggers=[tensorboard]",
    "metrics.enable_wandb": "loggers=[wandb]",
    "metrics.log_freq": "train.log_every",
    "mixed_precision": "train.precision",
    "model.flavor": "model",
    "model.hf_assets_path": "model.path",
    "nproc_per_node": "launch.nproc",
    "num_gpus": "launch.nproc",
    "num_machines": "launch.nnodes",
    "num_nodes": "launch.nnodes",
    "num_processes": "launch.nproc",
    "parallelism.context_parallel_degree": "strategy.context.degree",
    "parallelism.data_parallel_replicate_degree": "strategy.fsdp.replicate",
    "parallelism.data_parallel_shard_degree": "strategy=fsdp",
    "parallelism.expert_parallel_degree": "strategy.expert.degree",
    "parallelism.pipeline_parallel_degree": "strategy.pipeline.degree",
    "parallelism.pipeline_parallel_schedule": "strategy.pipeline.schedule",
    "parallelism.tensor_parallel_degree": "strategy.tensor.degree",
    "pipeline_parallel_size": "strategy.pipeline.degree",
    "pp": "strategy.pipeline.degree",
    "profiling.enable_profiling": "train.profile",
    "prompt_template": "data.prompt_format",
    "target_modules": "adapter.targets",
    "target_parameters": "adapter.targets",
    "tp": "strategy.tensor.degree",
    "training.dataset_path": "data.files",
    "training.global_batch_size": "train.global_batch_size",
    "training.local_batch_size": "train.micro_batch_size",
    "training.max_norm": "train.grad_clip",
    "training.mixed_precision_param": "train.precision",
    "training.mixed_precision_reduce": "strategy.reduce_dtype",
    "training.seq_len": "data.sequence_length",
    "training.steps": "train.steps",
    "use_cpu": "launch.device=cpu",
    "val_check_interval": "train.eval_every",
}
"""Maps names of accelerate, Lightning, torchrun and torchtitan to the key here, and short names.

Names of tools whose files ``axonlaunch convert`` reads are in ``validation.other_tools``.
"""

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
