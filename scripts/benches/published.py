"""Converts a row of published measurements to a configuration, or lists every obstacle.

Rows are never approximated: behavior of the measured code that no key selects is an obstacle, even
if the bytes might be the same. Nothing is run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from typing import Any, Literal

from axonlaunch.system.storage.cache import source_hash

GIB = 1024**3

Row = Mapping[str, Any]
Kind = Literal["allocated", "active", "reserved", "nvidia-smi", "steady"]

SOME_DATA_RANKS = "optimizer states divided among some of the data ranks"
"""Reason why such rows can't be expressed."""
_UNITS = {"bytes": 1, "GiB": GIB, "GB = 1e9": 10**9}
_SHARDED = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
_SCHEDULES = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved_1f1b"}
_OPTIMIZERS = {"muon": "muon", "bnb adamw 8-bit": "adamw_8bit", "torchao adamw 8-bit": "adamw_8bit"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row as a configuration.

    Attributes:
        overrides: Overrides for ``axonlaunch estimate``.
        expandable: Whether it set ``expandable_segments``.
        of_2024: Whether it used torchtitan of 2024 or of March 2025, which gathered its embedding
            and its head together with the other parameters outside of blocks, and did not compile
            its loss with the blocks.
        scope: Rank that was measured.
    """

    overrides: tuple[str, ...]
    expandable: bool
    of_2024: bool
    scope: Literal["highest", "first", "last"]


def measured(row: Row) -> dict[Kind, int]:
    """Return the measured bytes by kind, as far as the row says the kind."""
    metric = str(row.get("memory_metric", "")).lower()
    peaks: dict[Kind, int] = {}
    peak = _peak(row)
    if peak is not None and " or " not in metric:
        if "reserved" in metric and "allocated" not in metric:
            peaks["reserved"] = peak
        elif "nvidia-smi" in metric:
            peaks["nvidia-smi"] = peak
        elif metric.startswith("peak active"):
            peaks["active"] = peak
        elif "allocated" in metric and "allocated-type" not in metric:
            peaks["allocated"] = peak
    if "peak_active_gib" in row:
        peaks["active"] = round(row["peak_active_gib"] * GIB)
    if "steady_allocated_bytes" in row:
        peaks["steady"] = row["steady_allocated_bytes"]
    return peaks


def device_bytes(row: Row) -> int | None:
    """Return the memory of the row's GPU in bytes, if it is known."""
    reported = re.search(r"([\d.]+) GiB", row.get("gpu", "")) or re.search(
        r"(\d+) ?GB\b", row.get("gpu", "")
    )
    return None if reported is None else round(float(reported[1]) * GIB)


def masters(row: Row) -> Literal["sharded", "fp32", "none"] | None:
    """Return how fp32 weights are kept: as parameters, as masters, or not at all; None: unknown.

    With ZeRO-1, 16-bit weights have masters, which are the shards.
    """
    reported, parameters = str(row.get("master_weights")), str(row.get("param_dtype"))
    software = str(row.get("mixed_precision"))
    if "sharded params" in reported:
        return "sharded"
    of_zero1 = row.get("zero_stage") == 1 and parameters in ("bf16", "fp16")
    of_software = "fp32 main" in software or "fp32 master" in software
    if reported.startswith("fp32") or of_zero1 or of_software:
        return "fp32"
    return "none" if reported == "none" and parameters in ("bf16", "bf16 (pure_bf16)") else None


def divides_among_some(row: Row) -> bool:
    """Return whether ZeRO-1 or ZeRO-2 divides states among only some of the data ranks."""
    if row.get("zero_stage") not in (1, 2):
        return False
    ranks = row["num_gpus"] // ((row.get("tp") or 1) * (row.get("pp") or 1))
    size = row.get("zero1_group_size") or ranks // (row.get("dp_replicate") or 1)
    return bool(size < ranks)


def digest(*run: object) -> str:
    """Return a hash of a run, the source of axonlaunch and the version of torch."""
    return sha256(repr((run, source_hash(), version("torch"))).encode()).hexdigest()[:32]


def reasons(row: Row) -> list[str]:
    """Return every reason why a measured row can't be expressed as a run."""
    return list(dict.fromkeys(_reasons(row)))


def run(row: Row) -> Run:
    """Return a row without such reasons as a run."""
    sequence, vocabulary, world = row["seq_len"], row["vocab"], row["num_gpus"]
    titan = row["id"].startswith(("tt-", "ao-"))
    overrides = [
        *_model(row),
        "data=synthetic_tokens",
        f"data.vocab_size={vocabulary}",
        f"data.sequence_length={sequence}",
        f"launch.nproc={world}",
        f"train.global_batch_size={_batch(row)}",
        f"train.micro_batch_size={_micro_batch(row)}",
        f"train.activation_checkpointing={_recomputed(row)}",
        f"train.compile={str(_is_compiled(row)).lower()}",
        *_arithmetic(row),
        *_layout(row),
    ]
    first_of_titan = "pr165" in row["id"]
    return Run(
        overrides=tuple(overrides),
        # Its run_llama_train.sh sets them, but did not yet in March 2024.
        expandable=titan and not first_of_titan,
        of_2024=titan,
        scope=_scope(row),
    )


def _scope(row: Row) -> Literal["highest", "first", "last"]:
    scope = str(row.get("memory_rank_scope", ""))
    if "last PP stage" in scope:
        return "last"
    return "first" if "first PP stage" in scope else "highest"


def _arithmetic(row: Row) -> list[str]:
    """Return the formats of parameters, gradients, masters, states and products."""
    overrides = ["train.precision=bf16"]
    kept = masters(row)
    if kept != "sharded":
        overrides.append("train.param_dtype=bf16")
    if kept == "fp32":
        overrides += ["optimizer.master_weights=fp32"]
        overrides += ["train.grad_dtype=fp32"] if "fp32" in str(row.get("grad_dtype")) else []
    if (products := _products(row)) != "bf16":
        overrides.append(f"train.matmul_dtype={products}")
    if (option := _OPTIMIZERS.get(_optimizer(row))) is not None:
        overrides.append(f"optimizer={option}")
    if row.get("optimizer_in_bwd"):
        overrides.append("train.optimizer_in_backward=true")
    return overrides


def _layout(row: Row) -> list[str]:
    """Return the strategy, with its degrees and its schedule."""
    tensor, pipeline, context = (row.get(name) or 1 for name in ("tp", "pp", "cp"))
    replicas = row.get("dp_replicate") or 1
    if row["num_gpus"] == 1:
        strategy = "single"
    elif replicas > 1 and row["zero_stage"] == 3:
        strategy = "hsdp"
    else:
        strategy = _SHARDED[row["zero_stage"]]
    overrides = [
        f"strategy={strategy}",
        f"strategy.tensor.degree={tensor}",
        f"strategy.pipeline.degree={pipeline}",
        f"strategy.context.degree={context}",
    ]
    if strategy == "hsdp":
        overrides.append(f"strategy.fsdp.replicate={replicas}")
    if tensor > 1 and row.get("sequence_parallel"):
        overrides.append("strategy.tensor.sequence_parallel=true")
    if tensor > 1 and row.get("async_tp"):
        overrides.append("strategy.tensor.async_collectives=true")
    if pipeline > 1:
        overrides.append(f"strategy.pipeline.schedule={_SCHEDULES[row['pp_schedule']]}")
        if (row.get("virtual_stages") or 1) > 1:
            overrides.append(f"strategy.pipeline.stages_per_rank={row['virtual_stages']}")
    return overrides


def _products(row: Row) -> str | None:
    """Return the format of products; None if no setting has it."""
    reported = str(row.get("linear_precision") or row.get("fp8") or "bf16").lower()
    if row.get("float8_linear"):
        reported = str(row.get("linear_precision") or "float8").lower()
    known = {
        "bf16": "bf16",
        "float8": "fp8_tensorwise",
        "float8 rowwise, bf16 ag": "fp8_rowwise",
    }
    return known.get(reported)


def _optimizer(row: Row) -> str:
    return str(row.get("optimizer", "AdamW")).lower()


def _reasons(row: Row) -> Iterator[str]:
    if row["quality"] == "C":
        yield "quality C"
    if not measured(row):
        yield "what was measured is not given"
    sizes = ("layers", "hidden", "heads", "ffn", "vocab", "seq_len", "num_gpus")
    if missing := [name for name in sizes if not row.get(name)]:
        yield f"not given: {', '.join(missing)}"
    if _micro_batch(row) is None or _batch(row) is None:
        yield "not given: batch"
    yield from _of_model(row)
    yield from _of_arithmetic(row)
    yield from _of_run(row)


def _of_model(row: Row) -> Iterator[str]:
    if row.get("num_experts"):
        yield "mixture of experts"
    if row.get("mla") or row.get("encoder_layers") or row.get("mtp_layers"):
        yield "an architecture of its own"
    if row.get("finetune", "full") != "full":
        yield f"fine-tuning by {str(row['finetune']).split()[0]}"
    if not row.get("num_experts") and _shape(row) is None:
        norm, act, pos = row.get("norm"), row.get("activation"), row.get("pos_emb")
        reported = norm and act and pos
        yield (
            f"{norm} with {act} and {pos} positions" if reported else "not given: norm or positions"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if row.get(name):
            yield "dropout"
    if row.get("attention_backend") == "unfused" or row.get("transformer_impl") == "local":
        yield "unfused attention"


def _of_arithmetic(row: Row) -> Iterator[str]:
    if _products(row) is None:
        reported = row.get("linear_precision") or row.get("fp8")
        yield f"products in {reported}"
    kept = masters(row)
    if kept is None or (kept == "fp32" and row.get("param_dtype") != "bf16"):
        if row.get("master_weights"):
            yield f"{row.get('param_dtype')} parameters with {row['master_weights']} masters"
        else:
            yield "how parameters are kept is not given"
    if "main grads" in str(row.get("grad_dtype")):
        yield "gradients in buffers that exist between steps"
    optimizer = _optimizer(row)
    if optimizer in _OPTIMIZERS:
        if kept == "none" and "bnb" not in optimizer and "torchao" not in optimizer:
            yield f"optimizer {row['optimizer']} without masters"
    elif "adam" not in optimizer or re.search(r"\d-bit", optimizer):
        yield f"optimizer {row['optimizer']}"


def _of_run(row: Row) -> Iterator[str]:
    ranks = row.get("num_gpus") or 1
    if ranks > 1 and row.get("zero_stage") is None:
        yield "not given: stage of ZeRO"
    elif ranks > 1 and divides_among_some(row):
        yield SOME_DATA_RANKS
    if row.get("fsdp_impl") == "FSDP1":
        yield "FSDP1"
    if row.get("chunked_loss"):
        yield "logits of all chunks, in fp32 for one chunk"  # loss_chunk keeps none
    if (row.get("pp") or 1) > 1 and row.get("pp_schedule") not in _SCHEDULES:
        yield f"pipeline schedule {row.get('pp_schedule')}"
    if row.get("act_offload", "none") != "none":
        yield "activations offloaded"
    if row.get("offload", "none") not in ("none", False, None):
        yield f"offload {row['offload']}"
    if _recomputed(row) is None:
        yield f"recomputation: {row.get('ac_mode')}"
    if row.get("torch_compile") not in (True, False, None, "eager"):
        yield f"compiled by {str(row['torch_compile']).split()[0]}"


def _model(row: Row) -> list[str]:
    bare = {
        "hidden_size": row["hidden"],
        "num_hidden_layers": row["layers"],
        "num_attention_heads": row["heads"],
        "intermediate_size": row["ffn"],
        "vocab_size": row["vocab"],
        "tie_word_embeddings": str(bool(row.get("tied_embeddings"))).lower(),
        "max_position_embeddings": row["seq_len"],
    }
    option = "llama_debug" if _shape(row) == "llama" else "gpt"
    if option == "llama_debug":
        bare["num_key_value_heads"] = row.get("kv_heads") or row["heads"]
    return [f"model={option}", *(f"model.{name}={value}" for name, value in bare.items())]


def _shape(row: Row) -> str | None:
    reported = row.get("norm"), row.get("activation"), row.get("pos_emb"), row.get("linear_bias")
    if reported == ("rmsnorm", "swiglu", "rope", False):
        return "llama"
    return "gpt" if reported == ("layernorm", "gelu", "learned", True) else None


def _recomputed(row: Row) -> str | None:
    mode = str(row.get("ac_mode"))
    if mode == "none" or mode.startswith("full"):
        return mode[:4]
    return "selective" if mode.startswith("selective per-op") else None


def _micro_batch(row: Row) -> int | None:
    size: int | None = row.get("micro_batch_size") or row.get("local_batch_size")
    return size


def _batch(row: Row) -> int | None:
    size: int | None = row.get("global_batch_size")
    if size is None and row.get("num_gpus") == 1 and (samples := _micro_batch(row)):
        return samples * (row.get("grad_accum") or 1)
    return size


def _is_compiled(row: Row) -> bool:
    return row.get("torch_compile") not in (False, None, "eager")


def _peak(row: Row) -> int | None:
    if "peak_memory_bytes" in row:
        return int(row["peak_memory_bytes"])
    unit = str(row.get("peak_memory_unit", ""))
    for name, scale in _UNITS.items():
        if unit.startswith(name):
            key = "peak_memory_value" if "peak_memory_value" in row else "peak_memory_gib"
            return round(row[key] * scale) if key in row else None
    return None
