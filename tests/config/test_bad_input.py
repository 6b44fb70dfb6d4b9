"""Every wrong configuration is refused with its own message, at once and without torch."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError

# (overrides as typed in a shell, the problems in order)
WRONG: list[tuple[str, list[str]]] = [
    (
        "train.stepz=3",
        [
            "train.stepz=3: there is no such key; did you mean train.steps?",
        ],
    ),
    (
        "stepz=3",
        [
            "stepz=3: there is no such key; did you mean train.steps?",
        ],
    ),
    (
        "+stepz=3",
        [
            "stepz=3: there is no such key; did you mean train.steps?",
        ],
    ),
    (
        "steps=3",
        [
            "steps=3: there is no such key; did you mean train.steps?",
        ],
    ),
    (
        "strat=fsdp",
        [
            "strat=fsdp: there is no such key; did you mean strategy?",
        ],
    ),
    (
        "adapter=qlora",
        [
            "adapter=qlora: a quantised base (QLoRA) is not supported: in 4 bits torchao gives other weights where a layout cuts them, and can't cut them by inputs; use adapter=lora train.precision=bf16 train.param_dtype=bf16",
        ],
    ),
    (
        "adapter=lora adapter.load_in_4bit=true",
        [
            "adapter.load_in_4bit=true: a quantised base (QLoRA) is not supported: in 4 bits torchao gives other weights where a layout cuts them, and can't cut them by inputs; use adapter=lora train.precision=bf16 train.param_dtype=bf16",
        ],
    ),
    (
        "adapter=dora",
        [
            "adapter=dora: there is no such option; did you mean adapter=lora adapter.dora=true? known: lora",
        ],
    ),
    (
        "learning_rate=0.1",
        [
            "learning_rate=0.1: there is no such key; did you mean optimizer.lr?",
        ],
    ),
    (
        "optimizer.learning_rate=0.1",
        [
            "optimizer.learning_rate=0.1: there is no such key; did you mean optimizer.lr?",
        ],
    ),
    (
        "optimizer.beta=0.9",
        [
            "optimizer.beta=0.9: there is no such key; did you mean optimizer.betas?",
        ],
    ),
    (
        "strategy.fsdp.shard=full_shard",
        [
            "strategy.fsdp.shard=full_shard: there is no such key; did you mean strategy.fsdp.sharding?",
        ],
    ),
    (
        "strategy.sharding=full_shard",
        [
            "strategy.sharding=full_shard: there is no such key; did you mean strategy.fsdp.sharding?",
        ],
    ),
    (
        "model.hidden=3",
        [
            "model.hidden=3: there is no such key; did you mean model.hidden_size?",
        ],
    ),
    (
        "model.num_key_value_heads=2",
        [
            "model.num_key_value_heads=2: there is no such key here, only in model=llama",
        ],
    ),
    (
        "data.files=[x]",
        [
            "data.files=[x]: there is no such key here, only in data=text, documents or chat",
        ],
    ),
    (
        "optimizer.momentum=0.5",
        [
            "optimizer.momentum=0.5: there is no such key here, only in optimizer=sgd or muon",
        ],
    ),
    (
        "optimizer=sgd optimizer.betas=[0.9,0.9]",
        [
            "optimizer.betas=[0.9,0.9]: there is no such key here, only in optimizer=adamw, adam, nadam or lion",
        ],
    ),
    (
        "scheduler.decay_steps=3",
        [
            "scheduler.decay_steps=3: there is no such key here, only in scheduler=wsd",
        ],
    ),
    (
        "launch.procs=2",
        [
            "launch.procs=2: there is no such key; did you mean launch.nproc?",
        ],
    ),
    (
        "checkpoint.interval=3",
        [
            "checkpoint.interval=3: there is no such key; keys of checkpoint: async_save, every, fallback, keep_best, keep_every_n_steps, keep_last, path, resume",
        ],
    ),
    (
        "train.num_epochs=3",
        [
            "train.num_epochs=3: there is no such key; did you mean train.epochs?",
        ],
    ),
    (
        "train.batch=3",
        [
            "train.batch=3: there is no such key; did you mean train.global_batch_size?",
        ],
    ),
    (
        "train.log_evry=3",
        [
            "train.log_evry=3: there is no such key; did you mean train.log_every?",
        ],
    ),
    (
        "train.steps=abc",
        [
            "train.steps=abc: expected a whole number or auto",
        ],
    ),
    (
        "train.steps=1.5",
        [
            "train.steps=1.5: expected a whole number or auto",
        ],
    ),
    (
        "train.steps=1e3",
        [
            "train.steps=1000.0: expected a whole number; write 1000 or auto",
        ],
    ),
    (
        "train.steps=true",
        [
            "train.steps=true: expected a whole number or auto",
        ],
    ),
    (
        "train.steps=null",
        [
            "train.steps=null: expected a whole number or auto",
        ],
    ),
    (
        "train.steps=[1]",
        [
            "train.steps=[1]: expected a whole number or auto",
        ],
    ),
    (
        "train.steps={a:1}",
        [
            "train.steps={a:1}: expected a whole number or auto",
        ],
    ),
    (
        "train.steps=0",
        [
            "train.steps=0: must be at least 1",
        ],
    ),
    (
        "train.steps=-5",
        [
            "train.steps=-5: must be at least 1",
        ],
    ),
    (
        "train.global_batch_size=0",
        [
            "train.global_batch_size=0: must be at least 1",
        ],
    ),
    (
        "train.micro_batch_size=0",
        [
            "train.micro_batch_size=0: must be at least 1",
        ],
    ),
    (
        "train.micro_batch_size=some",
        [
            "train.micro_batch_size=some: expected a whole number or auto",
        ],
    ),
    (
        "train.grad_clip=0",
        [
            "train.grad_clip=0: must be above 0, or null",
        ],
    ),
    (
        "train.grad_clip=-1",
        [
            "train.grad_clip=-1: must be above 0, or null",
        ],
    ),
    (
        "train.grad_clip=abc",
        [
            "train.grad_clip=abc: expected a number or null",
        ],
    ),
    (
        "train.precision=bf32",
        [
            "train.precision=bf32: did you mean fp32? use fp32, bf16 or fp16",
        ],
    ),
    (
        "train.precision=16",
        [
            "train.precision=16: did you mean fp16? use fp32, bf16 or fp16",
        ],
    ),
    (
        "train.activation_checkpointing=true",
        [
            "train.activation_checkpointing=true: use none, full or selective",
        ],
    ),
    (
        "train.compile=yes",
        [
            "train.compile=yes: expected true or false",
        ],
    ),
    (
        "train.compile=1",
        [
            "train.compile=1: expected true or false",
        ],
    ),
    (
        "train.deterministic=on",
        [
            "train.deterministic=on: expected true or false",
        ],
    ),
    (
        "train.log_every=0",
        [
            "train.log_every=0: must be at least 1",
        ],
    ),
    (
        "train.eval_every=-1",
        [
            "train.eval_every=-1: must be at least 0",
        ],
    ),
    (
        "optimizer.lr=fast",
        [
            "optimizer.lr=fast: expected a number",
        ],
    ),
    (
        "optimizer.lr=-1",
        [
            "optimizer.lr=-1: must be at least 0",
        ],
    ),
    (
        "optimizer.lr=nan",
        [
            "optimizer.lr=nan: expected a finite number",
        ],
    ),
    (
        "optimizer.lr=inf",
        [
            "optimizer.lr=inf: expected a finite number",
        ],
    ),
    (
        "optimizer.betas=[0.9]",
        [
            "optimizer.betas=[0.9]: expected 2 values, got 1",
        ],
    ),
    (
        "optimizer.betas=0.9",
        [
            "optimizer.betas=0.9: expected a list, as in [a,b]",
        ],
    ),
    (
        "optimizer.betas=[0.9,1.0]",
        [
            "optimizer.betas=[0.9,1.0]: must be below 1",
        ],
    ),
    (
        "optimizer.betas=[0.9,x]",
        [
            "optimizer.betas=[0.9,x]: expected a number",
        ],
    ),
    (
        "optimizer.eps=0",
        [
            "optimizer.eps=0: must be above 0",
        ],
    ),
    (
        "optimizer=sgd optimizer.momentum=1",
        [
            "optimizer.momentum=1: must be below 1",
        ],
    ),
    (
        "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0",
        [
            "optimizer.nesterov=true: needs momentum above 0; set optimizer.momentum=0.9 or remove this setting",
        ],
    ),
    (
        "scheduler.final_lr_ratio=2",
        [
            "scheduler.final_lr_ratio=2: must be at most 1",
        ],
    ),
    (
        "scheduler.warmup_steps=-1",
        [
            "scheduler.warmup_steps=-1: must be at least 0",
        ],
    ),
    (
        "scheduler.warmup_steps=1000 train.steps=300",
        [
            "scheduler.warmup_steps=1000: train.steps is 300; use fewer, or auto, or train longer",
        ],
    ),
    (
        "scheduler=wsd scheduler.decay_steps=400 train.steps=300",
        [
            "scheduler.decay_steps=400: with 20 steps of warm-up it exceeds train.steps=300; use 280 or less",
        ],
    ),
    (
        "checkpoint.keep_last=0",
        [
            "checkpoint.keep_last=0: must be at least 1",
        ],
    ),
    (
        "checkpoint.every=-1",
        [
            "checkpoint.every=-1: must be at least 0",
        ],
    ),
    (
        "checkpoint.resume=nowhere",
        [
            "checkpoint.resume=nowhere: there is no such folder; give a run folder, a checkpoint, auto or never",
        ],
    ),
    (
        "launch.nproc=0",
        [
            "launch.nproc=0: must be at least 1",
        ],
    ),
    (
        "launch.nproc=many",
        [
            "launch.nproc=many: expected a whole number or auto",
        ],
    ),
    (
        "launch.nproc=3 train.global_batch_size=32",
        [
            "train.global_batch_size=32: must be divisible by 3 ranks; try 33, or 1, 2, 4, 8, 16 or 32 ranks",
        ],
    ),
    (
        "launch.nproc=64 train.global_batch_size=32",
        [
            "train.global_batch_size=32: must be divisible by 64 ranks; try 64, or 1, 2, 4, 8, 16 or 32 ranks",
        ],
    ),
    (
        "strategy=hybrid launch.nproc=8 train.global_batch_size=7",
        [
            "train.global_batch_size=7: must be divisible by 2 data-parallel ranks; try 8, or 1 or 7 data-parallel ranks",
        ],
    ),
    (
        "launch.nproc=4 train.micro_batch_size=3 train.global_batch_size=32",
        [
            "train.micro_batch_size=3: a rank's share of the global batch is 8 samples; use 1, 2, 4 or 8",
        ],
    ),
    (
        "launch.master_port=70000",
        [
            "launch.master_port=70000: must be at most 65535",
        ],
    ),
    (
        "launch.master_port=0",
        [
            "launch.master_port=0: must be at least 1",
        ],
    ),
    (
        "launch.backend=mpi",
        [
            "launch.backend=mpi: use auto, gloo, nccl or mock",
        ],
    ),
    (
        "launch.timeout_s=0",
        [
            "launch.timeout_s=0: must be above 0",
        ],
    ),
    (
        "strategy=fsdq",
        [
            "strategy=fsdq: there is no such option; did you mean fsdp? known: auto, ddp, fsdp, hsdp, hybrid, pipeline, single, tensor, zero1, zero2",
        ],
    ),
    (
        "strategy=FSDP3",
        [
            "strategy=FSDP3: there is no such option; did you mean fsdp? known: auto, ddp, fsdp, hsdp, hybrid, pipeline, single, tensor, zero1, zero2",
        ],
    ),
    (
        "strategy=zero3",
        [
            "strategy=zero3: there is no such option; did you mean fsdp? known: auto, ddp, fsdp, hsdp, hybrid, pipeline, single, tensor, zero1, zero2",
        ],
    ),
    (
        "checkpoint.resume=false",
        [
            "checkpoint.resume=false: expected auto, never or a path",
        ],
    ),
    (
        "+strategy=dpd",
        [
            "strategy=dpd: there is no such option; did you mean ddp? known: auto, ddp, fsdp, hsdp, hybrid, pipeline, single, tensor, zero1, zero2",
        ],
    ),
    (
        "model=gpt2",
        [
            "model=gpt2: there is no such option; did you mean gpt? known: custom, gpt, hf, llama, llama3_405b, llama3_70b, llama3_8b, llama_debug, mlp, vit; plugins=[module] registers your own",
        ],
    ),
    (
        "data=texts",
        [
            "data=texts: there is no such option; did you mean text? known: auto, chat, custom, digits, documents, python_source, synthetic_images, synthetic_tokens, text, tokens; plugins=[module] registers your own",
        ],
    ),
    (
        "optimizer=adan",
        [
            "optimizer=adan: there is no such option; did you mean adam? known: adafactor, adam, adamw, custom, lion, muon, nadam, sgd; plugins=[module] registers your own",
        ],
    ),
    (
        "scheduler=cosin",
        [
            "scheduler=cosin: there is no such option; did you mean cosine? known: constant, cosine, linear, wsd",
        ],
    ),
    (
        "hardware=h100",
        [
            "hardware=h100: there is no such option; did you mean h100_80gb? known: a100_40gb, a100_80gb, b200, cpu, h100_80gb, h100_96gb, h200, mi300x, rtx4090",
        ],
    ),
    (
        "launch=slurmm",
        [
            "launch=slurmm: there is no such option; did you mean slurm? known: auto, env, local, slurm; plugins=[module] registers your own",
        ],
    ),
    (
        "experiment=nothing",
        [
            "experiment=nothing: there is no such option; known: digits_mlp, llama3_8b, tiny_llama",
        ],
    ),
    (
        "strategy=pipeline launch.nproc=2 train.global_batch_size=8 train.micro_batch_size=3",
        [
            "train.micro_batch_size=3: a rank's share of the global batch is 8 samples; use 1, 2 or 4",
        ],
    ),
    (
        "strategy=single launch.nproc=2",
        [
            "launch.nproc=2: 2 ranks would train independent copies; use strategy.data_parallel=ddp or 1 rank",
        ],
    ),
    (
        "strategy=ddp strategy.fsdp.cpu_offload=params",
        [
            "strategy.fsdp.cpu_offload=params: data_parallel is ddp; use strategy.data_parallel=fsdp or remove this setting",
        ],
    ),
    (
        "strategy=fsdp strategy.ddp.sync=no_sync",
        [
            "strategy.ddp.sync=no_sync: data_parallel is fsdp; use strategy.data_parallel=ddp or remove this setting",
        ],
    ),
    (
        "strategy.fsdp.sharding=hybrid_shard",
        [
            "strategy.fsdp.sharding=hybrid_shard: data_parallel is ddp; use strategy.data_parallel=fsdp or remove this setting",
        ],
    ),
    (
        "strategy=fsdp strategy.fsdp.replicate=2",
        [
            "strategy.fsdp.replicate=2: sharding is full_shard; use hybrid_shard, or remove this setting",
        ],
    ),
    (
        "strategy=hsdp strategy.fsdp.replicate=3 launch.nproc=4",
        [
            "strategy.fsdp.replicate=3: 4 ranks are not divisible by it; use 1, 2 or 4",
        ],
    ),
    (
        "strategy=hsdp strategy.fsdp.replicate=0",
        [
            "strategy.fsdp.replicate=0: must be at least 1",
        ],
    ),
    (
        "strategy.data_parallel=zero9",
        [
            "strategy.data_parallel=zero9: did you mean zero1? use ddp, fsdp, none or zero1; or null",
        ],
    ),
    (
        "strategy.ddp.bucket_size_mb=0",
        [
            "strategy.ddp.bucket_size_mb=0: must be above 0",
        ],
    ),
    (
        "strategy.ddp.sync=overlap",
        [
            "strategy.ddp.sync=overlap: did you mean overlapped? use overlapped, synchronous or no_sync",
        ],
    ),
    (
        "model.name=gtp",
        [
            "model.name=gtp: there is no model 'gtp'; did you mean gpt? known: custom, gpt, hf, llama, mlp, vit",
        ],
    ),
    (
        "data.name=texts",
        [
            "data.name=texts: there is no data 'texts'; did you mean text? known: chat, custom, digits, documents, python_source, synthetic_images, synthetic_tokens, text, tokens",
        ],
    ),
    (
        "optimizer.name=adma",
        [
            "optimizer.name=adma: there is no optimizer 'adma'; did you mean adam? known: adafactor, adam, adamw, custom, lion, muon, nadam, sgd",
        ],
    ),
    (
        "model=5",
        [
            "model=5: there is no such option; known: custom, gpt, hf, llama, llama3_405b, llama3_70b, llama3_8b, llama_debug, mlp, vit; plugins=[module] registers your own",
        ],
    ),
    (
        "model.hidden_size=192 model.num_attention_heads=5",
        [
            "model.num_attention_heads=5: hidden_size=192 is not divisible by it; use 1, 2, 3, 4, 6, 8, 96 or 192",
        ],
    ),
    (
        "model.hidden_size=0",
        [
            "model.hidden_size=0: must be at least 1",
        ],
    ),
    (
        "model=llama_debug model.num_key_value_heads=3",
        [
            "model.num_key_value_heads=3: num_attention_heads=8 is not divisible by it; use 1, 2, 4 or 8",
        ],
    ),
    (
        "model=vit model.patch_size=5",
        [
            "model.patch_size=5: image_size=28 is not divisible by it; use 1, 2, 4, 7, 14 or 28",
        ],
    ),
    (
        "model=custom",
        [
            "model.target: is missing; write model.target=...",
        ],
    ),
    (
        "model=custom model.target=nocolon",
        [
            "model.target=nocolon: is not of the form package.module:build",
        ],
    ),
    (
        "data=text",
        [
            "data.files: is missing; write data.files=...",
        ],
    ),
    (
        "data=text data.files=[]",
        [
            "data.files=[]: names no file; write data.files=[notes.txt,'corpus/**/*.md']",
        ],
    ),
    (
        "data=tokens",
        [
            "data.path: is missing; write data.path=...",
        ],
    ),
    (
        "data.sequence_length=0",
        [
            "data.sequence_length=0: must be at least 1",
        ],
    ),
    (
        "data.eval_fraction=1",
        [
            "data.eval_fraction=1: must be below 1",
        ],
    ),
    (
        "seed=-1",
        [
            "seed=-1: must be at least 0",
        ],
    ),
    (
        "seed=abc",
        [
            "seed=abc: expected a whole number",
        ],
    ),
    (
        "name=../up",
        [
            "name=../up: must be a folder's name below runs/; use run_dir for a path",
        ],
    ),
    (
        "name=/abs",
        [
            "name=/abs: must be a folder's name below runs/; use run_dir for a path",
        ],
    ),
    (
        "name=''",
        [
            "name=: must be a folder's name below runs/; use run_dir for a path",
        ],
    ),
    (
        "plugins=foo",
        [
            "plugins=foo: expected a list, as in [a,b]",
        ],
    ),
    (
        "plugins=[no_such_plugin]",
        [
            "plugins=no_such_plugin: there is no module no_such_plugin; looked in {cwd} and the installed packages",
        ],
    ),
    (
        "train=5",
        [
            "train=5: is a group of keys; set one of them, as in train.steps=...",
        ],
    ),
    (
        "train.steps",
        [
            "train.steps: not an override; write train.steps=VALUE",
        ],
    ),
    (
        "train.steps = 7",
        [
            "train.steps = 7: has spaces; write train.steps=7",
        ],
    ),
    (
        "llama_debug",
        [
            "llama_debug: not an override; write model=llama_debug",
        ],
    ),
    (
        "something",
        [
            "something: not an override; write key=value",
        ],
    ),
    (
        "strategy=[ddp,fsdp]",
        [
            "strategy=[ddp,fsdp]: it takes one option; to run several in turn write -m "
            "strategy=ddp,fsdp",
        ],
    ),
    (
        "=5",
        [
            "=5: has no key; write key=value",
        ],
    ),
    (
        "train.steps=[1",
        [
            "train.steps=[1: not an override (no viable alternative at input '[1'); write key=value",
        ],
    ),
    (
        "train.steps=1,2",
        [
            "train.steps=1,2: several values; add -m to run them one after another",
        ],
    ),
    (
        "hydra.run.dir=x",
        [
            "hydra.run.dir=x: Hydra's own settings are not supported; remove it",
        ],
    ),
    (
        "name=${nothing}",
        [
            "name: Interpolation key 'nothing' not found",
        ],
    ),
    (
        "~nothing",
        [
            "Could not delete from config. 'nothing' does not exist",
        ],
    ),
    (
        "train.steps=3 train.stepz=4 optimizer.lr=x strategy=fsdp strategy.ddp.sync=no_sync launch.nproc=3 train.global_batch_size=32",
        [
            "optimizer.lr=x: expected a number",
            "train.stepz=4: there is no such key; did you mean train.steps?",
            "strategy.ddp.sync=no_sync: data_parallel is fsdp; use strategy.data_parallel=ddp or remove this setting",
            "train.global_batch_size=32: must be divisible by 3 ranks; try 33, or 1, 2, 4, 8, 16 or 32 ranks",
        ],
    ),
    (
        "strategy.tensor.degree=0",
        [
            "strategy.tensor.degree=0: must be at least 1",
        ],
    ),
    (
        "strategy.tensor.sequence_parallel=true",
        [
            "strategy.tensor.sequence_parallel=true: strategy.tensor.degree is 1; use 2 or more, or remove this setting",
        ],
    ),
    (
        "strategy.tensor.plan=column",
        [
            "strategy.tensor.plan=column: expected keys with values, as in {key: value}",
        ],
    ),
    (
        "strategy=tensor launch.nproc=3",
        [
            "strategy.tensor.degree=2: 3 ranks are not divisible by it; use 1 or 3",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.degree=4 launch.nproc=6",
        [
            "strategy.pipeline.degree=4: 6 ranks are not divisible by it; use 1, 2, 3 or 6",
        ],
    ),
    (
        "strategy=hybrid launch.nproc=6",
        [
            "launch.nproc=6: strategy.pipeline.degree=2 x strategy.tensor.degree=2 take 4 ranks; use 4, 8 or another multiple",
        ],
    ),
    (
        "strategy=tensor strategy.pipeline.degree=2 strategy.context.degree=2 launch.nproc=4",
        [
            "launch.nproc=4: strategy.pipeline.degree=2 x strategy.context.degree=2 x strategy.tensor.degree=2 take 8 ranks; use 8, 16 or another multiple",
        ],
    ),
    (
        "strategy=single strategy.tensor.degree=2 launch.nproc=4",
        [
            "launch.nproc=4: 4 ranks would train independent copies; use strategy.data_parallel=ddp or 2 ranks",
        ],
    ),
    (
        "strategy=hsdp strategy.fsdp.replicate=3 strategy.tensor.degree=2 launch.nproc=8",
        [
            "strategy.fsdp.replicate=3: 4 ranks are not divisible by it; use 1, 2 or 4",
        ],
    ),
    (
        "strategy.pipeline.schedule=gpipe",
        [
            "strategy.pipeline.schedule=gpipe: strategy.pipeline.degree is 1; use 2 or more, or remove this setting",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.schedule=1f2b",
        [
            "strategy.pipeline.schedule=1f2b: did you mean 1f1b? use gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv_zero_bubble or dualpipev",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.stages_per_rank=2",
        [
            "strategy.pipeline.stages_per_rank=2: schedule=1f1b has 1; use 1 or auto, or schedule=interleaved_1f1b, looped_bfs or interleaved_zero_bubble",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.schedule=zbv_zero_bubble strategy.pipeline.stages_per_rank=3",
        [
            "strategy.pipeline.stages_per_rank=3: schedule=zbv_zero_bubble has 2; use 2 or auto, or schedule=interleaved_1f1b, looped_bfs or interleaved_zero_bubble",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.split=[1,2,3]",
        [
            "strategy.pipeline.split=[1,2,3]: 2 ranks with 1 each have 2 stages; list so many",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.split=[0,4]",
        [
            "strategy.pipeline.split=[0,4]: each stage holds at least 1 block",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.split=even",
        [
            "strategy.pipeline.split=even: expected a list, as in [a,b] or auto",
        ],
    ),
    (
        "strategy=pipeline launch.nproc=2 strategy.pipeline.microbatches=3",
        [
            "strategy.pipeline.microbatches=3: a rank has 4 per step; use 2 or 4",
        ],
    ),
    (
        "strategy=pipeline launch.nproc=2 strategy.pipeline.microbatches=1",
        [
            "strategy.pipeline.microbatches=1: schedule=1f1b on 2 ranks needs at least 2 micro-batches; use 2 or 4",
        ],
    ),
    (
        "strategy=pipeline launch.nproc=2 train.micro_batch_size=16",
        [
            "train.micro_batch_size=16: schedule=1f1b on 2 ranks needs at least 2 micro-batches, a rank has 1 of 16 samples; use 1, 2, 4 or 8",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.degree=4 launch.nproc=4 train.global_batch_size=2",
        [
            "train.global_batch_size=2: schedule=1f1b on 4 ranks needs at least 4 micro-batches, a rank has 2 of 1 samples; use 4 or a multiple of it",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.degree=2 strategy.pipeline.schedule=dualpipev launch.nproc=2 train.micro_batch_size=8",
        [
            "train.micro_batch_size=8: schedule=dualpipev on 2 ranks needs at least 4 micro-batches, a rank has 2 of 8 samples; use 1, 2 or 4",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.degree=4 strategy.pipeline.schedule=interleaved_1f1b launch.nproc=4 train.global_batch_size=9 train.micro_batch_size=1",
        [
            "train.global_batch_size=9: schedule=interleaved_1f1b needs micro-batches that fill rounds of about 4, a rank has 9 of 1 samples; use 4 or a multiple of it",
        ],
    ),
    (
        "strategy=tensor train.compile=true train.activation_checkpointing=full",
        [
            "train.activation_checkpointing=full: torch's compiler can't compute again what strategy.tensor.degree divides; use selective or none, or train.compile=false",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.schedule=zbv_zero_bubble train.compile=true",
        [
            "train.compile=true: strategy.pipeline.schedule=zbv_zero_bubble computes weight gradients apart, which compiled blocks can't; use false, or a schedule that keeps backward whole",
        ],
    ),
    (
        "strategy=pipeline strategy.pipeline.schedule=dualpipev train.activation_checkpointing=selective",
        [
            "train.activation_checkpointing=selective: strategy.pipeline.schedule=dualpipev goes back through a block twice, for which selective recomputation has no second set of activations; use full or none",
        ],
    ),
    (
        "strategy.reduce_dtype=fp8",
        [
            "strategy.reduce_dtype=fp8: use fp32 or bf16",
        ],
    ),
    (
        "strategy.tensor.degre=2",
        [
            "strategy.tensor.degre=2: there is no such key; did you mean strategy.tensor.degree?",
        ],
    ),
    (
        "strategy.tp.degree=2",
        [
            "strategy.tp: there is no such key; did you mean strategy.tensor.degree?",
        ],
    ),
    (
        "sample.prompt=",
        [
            "sample.prompt=: is empty; give at least one character, or sample.max_new_tokens=0",
        ],
    ),
    (
        "strategy=single strategy.context.degree=2",
        [
            "strategy.context.degree=2: ranks that share a sequence have to sum gradients, and data_parallel is none; use ddp, zero1 or fsdp, or 1",
        ],
    ),
]


@pytest.mark.parametrize(("overrides", "problems"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_configuration_is_reported_in_exact_words(
    overrides: str, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        config.load(shlex.split(overrides))
    reported = [str(problem) for problem in raised.value.problems]
    assert reported == [problem.replace("{cwd}", str(tmp_path)) for problem in problems]
    assert list(tmp_path.iterdir()) == []


def test_a_key_like_none_here_is_not_taken_for_a_far_one_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"train.epz=3: there is no such key; keys of train: "):
        config.load(["train.epz=3"])


def test_an_unknown_primary_config_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--config-name foo: there is no config 'foo'"):
        config.load([], config_name="foo")


def test_a_missing_config_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        config.load([], config_dirs=[tmp_path / "nowhere"])


def test_yaml_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("name: gpt\nhidden_size: [1\n")
    with pytest.raises(ConfigError, match=r"broken.yaml:3:1: not YAML"):
        config.load(["model=broken"], config_dirs=[tmp_path])


def test_a_wrong_configuration_exits_2_with_a_line_a_problem_and_no_torch(tmp_path: Path) -> None:
    overrides = ["train.stepz=3", "optimizer.lr=x", "strategy=fsdq", "launch.nproc=3"]
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "axonlaunch", "config", *overrides],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    assert ran.returncode == 2
    assert len(lines) == 4
    assert all(line.startswith("error: ") for line in lines)
    assert "| torch\n" not in ran.stderr
    assert ran.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_in_a_users_file_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ntrain:\n  steps: none\n")
    with pytest.raises(config.ConfigError, match=f"train.steps=none: .*in {file}\\)$"):
        config.load(["experiment=mine"], config_dirs=[tmp_path])
    file.write_text("train:\n  steps: 7\n")
    with pytest.raises(config.ConfigError, match="begins with # @package _global_"):
        config.load(["experiment=mine"], config_dirs=[tmp_path])
    file.write_text("# @package _global_\ntrain:\n  steps: 7\n")
    with pytest.raises(config.ConfigError) as refused:
        config.load(["experiment=mine", "train.steps=none"], config_dirs=[tmp_path])
    assert str(file) not in str(refused.value)
