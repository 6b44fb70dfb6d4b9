"""Tables of other tools' names for keys and options, for hints when a name is unknown."""

from __future__ import annotations

FOREIGN_OPTIONS = {
    "adapter=dora": "adapter=lora adapter.dora=true",
    "adapter=qlora": "adapter=lora adapter.base=nf4",
    "adapter=rslora": "adapter=lora adapter.rslora=true",
    "launch=k8s": "kubernetes",
    "launch=mpirun": "auto, in a command started by mpirun",
    "launch=submitit": "slurm",
    "launch=torchrun": "auto, in a command started by torchrun",
    "optimizer=adamw_apex_fused": "adamw",
    "optimizer=adamw_bnb_8bit": "adamw_8bit",
    "optimizer=adamw_hf": "adamw",
    "optimizer=adamw_torch": "adamw",
    "optimizer=adamw_torch_8bit": "adamw_8bit",
    "optimizer=adamw_torch_fused": "adamw",
    "optimizer=lion_32bit": "lion",
    **{
        f"optimizer=paged_{name}": f"{meant} with strategy.fsdp.cpu_offload=optimizer_states"
        for name, meant in {
            "adamw": "adamw",
            "adamw_32bit": "adamw",
            "adamw_8bit": "adamw_8bit",
            "lion_32bit": "lion",
            "lion_8bit": "lion_8bit",
        }.items()
    },
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

_OF_SBATCH = (
    *(
        "begin",
        "comment",
        "constraint",
        "cpus_per_gpu",
        "dependency",
        "exclude",
        "gres",
        "licenses",
    ),
    *("mail_type", "mail_user", "mem", "mem_per_cpu", "mem_per_gpu", "nice", "nodelist", "qos"),
    *("reservation", "switches", "tmp"),
)
"""Options of sbatch that ``launch.slurm`` has no key for."""
_OF_PODS = (
    *("affinity", "annotations", "env", "host_ipc", "host_network", "image_pull_policy"),
    *("image_pull_secrets", "init_containers", "labels", "limits", "pull_policy", "pull_secrets"),
    *("requests", "resources", "restart_policy", "security_context", "shm_size"),
    *("topology_spread_constraints", "ttl_seconds_after_finished"),
)
"""Fields of Kubernetes that ``launch.kubernetes`` has no key for."""

_SAMPLES = "train.global_batch_size, the samples of one step on all devices"

FOREIGN_NAMES = {
    **{
        f"launch.slurm.{name}": f"launch.slurm.extra_args=['--{name.replace('_', '-')}=VALUE']"
        for name in _OF_SBATCH
    },
    **{
        f"launch.kubernetes.{name}": "launch.kubernetes.patch, a file merged into the job"
        for name in _OF_PODS
    },
    "gpus_per_node": "launch.nproc",
    "hostfile": "launch.nnodes, launch.node_rank and launch.master_addr on each node",
    "launch.kubernetes.gpus": "launch.nproc",
    "launch.kubernetes.replicas": "launch.nnodes",
    "launch.slurm.nodes": "launch.nnodes",
    "launch.slurm.ntasks_per_node": "launch.nproc",
    "launch.slurm.setup": "launch.slurm.prologue",
    "launch.slurm.timeout_min": "launch.slurm.time",
    "launch.slurm.walltime": "launch.slurm.time",
    "rdzv_endpoint": "launch.master_addr and launch.master_port",
    "bnb_4bit_quant_type": "adapter.base",
    "quantization_config": "adapter.base",
    "quantize_base": "adapter.base=nf4",
    "accelerator": "launch.device",
    "accumulate_grad_batches": _SAMPLES,
    "activation_checkpoint.mode": "train.activation_checkpointing",
    "adapter.bias": "train.unfreeze=['*.bias']",
    "adapter.r": "adapter.rank",
    "adapter.target_modules": "adapter.targets",
    "batch": _SAMPLES,
    "batch_size": _SAMPLES,
    "checkpoint.async_mode": "checkpoint.async_save",
    "checkpoint.folder": "checkpoint.path",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "compile.enable": "train.compile",
    "comm.init_timeout_seconds": "launch.timeout_s",
    "dataset": "data=chat or data=documents with data.files",
    "datasets": "data=chat or data=documents with data.files",
    "debug.deterministic": "train.deterministic",
    "debug.seed": "seed",
    "deepspeed_config.zero_stage": "strategy=zero1, zero2 or fsdp",
    "devices": "launch.nproc",
    "distributed_type": "strategy",
    "enable_async_tensor_parallel": "strategy.tensor.async_collectives",
    "fsdp_config": "strategy.fsdp",
    "fsdp_config.fsdp_sharding_strategy": "strategy.fsdp.sharding",
    "fsdp_sharding_strategy": "strategy.fsdp.sharding",
    "gpu_ids": "launch.nproc, and CUDA_VISIBLE_DEVICES",
    "gpus": "launch.nproc",
    "gradient_clip_val": "train.grad_clip",
    "gradient_clipping": "train.grad_clip",
    "job.dump_folder": "run_dir",
    "limit_val_batches": "train.eval_batches, in global batches",
    "lr_scheduler.decay_ratio": "scheduler.decay_ratio",
    "lr_scheduler.decay_type": "scheduler",
    "lr_scheduler.min_lr_factor": "scheduler.final_lr_ratio",
    "lr_scheduler.warmup_steps": "scheduler.warmup_steps",
    "machine_rank": "launch.node_rank",
    "main_process_ip": "launch.master_addr",
    "main_process_port": "launch.master_port",
    "max_epochs": "train.epochs",
    "max_seq_len": "data.sequence_length",
    "messages_field": "data.fields={messages: NAME}",
    "mixed_precision": "train.precision",
    "model.flavor": "model",
    "model.hf_assets_path": "model.path",
    "nproc_per_node": "launch.nproc",
    "num_gpus": "launch.nproc",
    "num_machines": "launch.nnodes",
    "num_nodes": "launch.nnodes",
    "num_processes": "launch.nproc, the ranks of one node",
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
    "training.compile": "train.compile",
    "training.dataset_path": "data.files",
    "training.global_batch_size": "train.global_batch_size",
    "training.local_batch_size": "train.micro_batch_size",
    "training.max_norm": "train.grad_clip",
    "training.mixed_precision_param": "train.precision",
    "training.mixed_precision_reduce": "strategy.reduce_dtype",
    "training.seq_len": "data.sequence_length",
    "training.steps": "train.steps",
    "use_cpu": "launch.device=cpu",
    "val_check_interval": "train.eval_every, in optimizer steps or epochs",
}
"""Maps names of accelerate, Lightning, torchrun, torchtitan, submitit, sbatch and Kubernetes to the
key here, and short names. ``VALUE`` stands for the user's value.

Names of tools whose files ``axonlaunch convert`` reads are in ``validation.other_tools``.
"""

_NO_SYMMETRIC_MEMORY = (
    "collectives of fully_shard in symmetric memory are not offered, because they were not "
    "compared with those of NCCL; remove it, or use strategy.tensor.async_collectives, which uses "
    "symmetric memory on a tensor axis"
)
NOT_OFFERED = dict.fromkeys(("symm_mem", "symmetric_memory"), _NO_SYMMETRIC_MEMORY)
"""Maps names of what users look for in vain to the reason and what to use instead."""
