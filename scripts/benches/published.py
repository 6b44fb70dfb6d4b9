"""Converts a row of published measurements to a configuration, or lists every obstacle.

Rows are never approximated: behavior of the measured code that no key selects is an obstacle, even
if the bytes might be the same. Nothing is run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

GIB = 1024**3

Row = Mapping[str, Any]
Kind = Literal["allocated", "active", "reserved", "nvidia-smi", "steady"]

_UNITS = {"bytes": 1, "GiB": GIB, "GB = 1e9": 10**9}
_BF16_MASTERS = "half-precision parameters beside fp32 masters and main gradients"
_NO_MASTERS = "bf16 parameters, gradients and optimizer states"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row as a configuration.

    Attributes:
        overrides: Overrides for ``axonlaunch estimate``.
        expandable: Whether it set ``expandable_segments``.
        of_2024: Whether it used torchtitan of 2024, which gathered its embedding and its head
            together with the other parameters outside of blocks, and did not compile its loss with
            the blocks.
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


def reasons(row: Row) -> list[str]:
    """Return every reason why a measured row can't be expressed as a run."""
    return list(dict.fromkeys(_reasons(row)))


def run(row: Row) -> Run:
    """Return a row without such reasons as a run."""
    sequence, vocabulary, world = row["seq_len"], row["vocab"], row["num_gpus"]
    titan = row["id"].startswith(("tt-", "ao-"))
    overrides = [
        *_model(row),
        f"model.max_position_embeddings={sequence}",
        "data=synthetic_tokens",
        f"data.vocab_size={vocabulary}",
        f"data.sequence_length={sequence}",
        f"launch.nproc={world}",
        f"train.global_batch_size={_batch(row)}",
        f"train.micro_batch_size={_micro_batch(row)}",
        f"train.activation_checkpointing={_recomputed(row)}",
        "train.precision=bf16",
        f"train.compile={str(_is_compiled(row)).lower()}",
        f"strategy.tensor.degree={row.get('tp') or 1}",
        f"strategy.pipeline.degree={row.get('pp') or 1}",
    ]
    if (row.get("tp") or 1) > 1 and row.get("sequence_parallel"):
        overrides.append("strategy.tensor.sequence_parallel=true")
    if (row.get("dp_replicate") or 1) > 1:
        overrides += ["strategy=hsdp", f"strategy.fsdp.replicate={row['dp_replicate']}"]
    else:
        overrides.append("strategy=fsdp")
    first_of_titan = "pr165" in row["id"]
    return Run(
        overrides=tuple(overrides),
        # Its run_llama_train.sh sets them, but did not yet in March 2024.
        expandable=titan and not first_of_titan,
        of_2024=titan,
        scope="highest",
    )


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
    precision = str(row.get("linear_precision", "bf16")).lower()
    if row.get("float8_linear") or row.get("fp8") or not precision.startswith("bf16"):
        yield "float8"
    masters, parameters = str(row.get("master_weights")), str(row.get("param_dtype"))
    if "sharded params" in masters:
        pass
    elif masters.startswith("fp32"):
        yield _BF16_MASTERS
    elif masters == "none" or "pure" in parameters or "true" in parameters:
        yield _NO_MASTERS
    else:
        yield "how parameters are kept is not given"
    optimizer = str(row.get("optimizer", "AdamW")).lower()
    if "adam" not in optimizer or re.search(r"\d-bit", optimizer):
        yield f"optimizer {row['optimizer']}"


def _of_run(row: Row) -> Iterator[str]:
    if row.get("fsdp_impl") == "FSDP1":
        yield "FSDP1"
    for name in ("chunked_loss", "optimizer_in_bwd"):
        if row.get(name):
            yield name.replace("_", " ")
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
