"""Converts published measurements of speed to configurations and hardware.

Uses only information in a row; a row that can't be expressed has a reason.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import published

from axonlaunch import config as configs
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.options.hardware import HardwareConfig

GPT2_VOCABULARY = 50257
"""Megatron's default, used if its rows have no vocabulary."""
NODE_GBIT_S = {
    # bigscience train/tr11-176B-ml/README.md: 4 OmniPath links a node, of 100 Gb/s
    "bigscience": 400,
    # in the rows themselves: "4x100Gb RoCE per node", "400Gbps"
    "internevo": 400,
    "fms": 400,
}
"""Network of a node, Gb/s, if the source differs from the maker's system."""

EVEN_STAGES = ("bigscience", "korthikanti", "mlm")
"""Sources with Megatron's pipelines, whose stages have equally many layers."""
SAME_CLUSTER = {"ultrascale": "nanotron"}
"""Sources that ran on the cluster of another one, by the start of their identifiers."""
HARDWARE = (
    (r"A100.*40 ?GB", "a100_40gb"),
    (r"A100.*80 ?GB", "a100_80gb"),
    (r"^H100 9[56]", "h100_96gb"),
    (r"^(DGX-)?H100", "h100_80gb"),
    (r"H200", "h200"),
)
"""Patterns of GPU names, and the hardware group of each."""
HOPPER = ("h100_80gb", "h100_96gb", "h200")
FLASH_ATTENTION_2 = 0.34
"""Fraction of Hopper's peak that the kernel of those years reached, up to 335 TFLOP/s: Dao,
"FlashAttention-2", 2023, section 4.1. The hardware groups have the figure of torch's current
kernel.
"""
UNFUSED = 0.08
"""Fraction of an A100's peak that unfused attention reaches.

Source: Korthikanti et al., 2022, table 4: computing 8 heads of 96 features for 4 x 2,048
positions again takes 1.3 ms, or 20 TFLOP/s if half of the square is counted.
"""
ATTENTION = {
    # Torch 1.13 of 2023, before FlashAttention-2: 25 to 40% of an A100's peak (the same paper,
    # abstract); the middle.
    "llmfoundry": 0.325,
    "korthikanti": UNFUSED,
    "bigscience": UNFUSED,
}
"""Fraction of an A100's peak that the attention of older software reaches on long sequences."""
CSV_NUMBERS = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "num_gpus"),
    *("tp", "pp", "zero_stage", "micro_batch_size", "grad_accum"),
)


class NotExpressedError(ValueError):
    """Reason why a row can't be expressed as a run."""


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        id: Identifier in its file.
        group: Group of comparable rows: table, model, hardware and number of devices.
        config: Configuration of the run.
        hardware: Hardware of the run.
        tokens_per_s: Measured tokens per second and device.
    """

    id: str
    group: tuple[str, str, str, int]
    config: RunConfig
    hardware: HardwareConfig
    tokens_per_s: float

    @property
    def source(self) -> str:
        """Name of the source, which stands for one cluster and one software."""
        name = self.id.split("-")[0]
        return SAME_CLUSTER.get(name, name)

    @property
    def layout(self) -> str:
        """Degrees, micro-batch and recomputation in words."""
        strategy, train = self.config.strategy, self.config.train
        degrees = Layout.of(self.config, world_size=num_ranks(self.config)).axes
        words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        words += [f"micro-batch {train.micro_batch_size}", f"recomputation {train.recomputation}"]
        return ", ".join([str(strategy.data_parallel), *words])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the unchanged rows of a JSON lines or CSV file."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [_from_csv(index, row) for index, row in enumerate(csv.DictReader(file), 1)]
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def express(row: dict[str, Any]) -> Row:
    """Return a row as a run.

    Raises:
        NotExpressedError: The row is not in the catalog, or lacks information.
    """
    measured = _measured(row)
    hardware, option = _hardware(row)
    try:
        config = configs.load([*_model(row), *_layout(row), *_training(row), f"hardware={option}"])
    except ConfigError as error:
        problem = error.problems[0]
        raise NotExpressedError(f"{problem.key} is refused") from None
    table = str(row.get("group") or row["id"].split("-")[0])
    if "across dates" in str(row.get("notes")):
        table += " " + str(row["source"]).rpartition("(")[2].rstrip(")")
    group = (table, str(row["model"]), option, int(row["num_gpus"]))
    return Row(row["id"], group, config, hardware, measured)


def _from_csv(index: int, row: dict[str, str]) -> dict[str, Any]:
    numbers = {key: int(row[key]) for key in CSV_NUMBERS}
    return {
        **numbers,
        "id": f"ultrascale-{index:03}",
        "model": row["model"],
        "gpu": row["gpu"],
        "activation": "swiglu",
        "tied_embeddings": row["tied_embeddings"] == "True",
        "param_dtype": row["param_dtype"],
        "grad_dtype": row["grad_dtype"],
        "master_weights": "fp32" if "master fp32" in row["optimizer"] else "",
        "ac_mode": row["ac_mode"],
        "pp_schedule": row["pp_schedule"],
        "sequence_parallel": True,  # the script's default; the chart does not say
        "tokens_per_s_per_gpu": float(row["tok_s_per_gpu"] or 0),
        "global_batch_size": int(row["global_batch_seqs"]),
    }


def _measured(row: dict[str, Any]) -> float:
    if row.get("throughput_usable") is False:
        raise NotExpressedError("its source says not to use its timings")
    if row.get("tokens_per_s_per_gpu"):
        return float(row["tokens_per_s_per_gpu"])
    if row.get("ms_per_iter"):
        return float(row["micro_batch_size"] * row["seq_len"] / (row["ms_per_iter"] / 1000))
    raise NotExpressedError("no tokens a second")


def _hardware(row: dict[str, Any]) -> tuple[HardwareConfig, str]:
    gpu = str(row.get("gpu"))
    option = next((name for pattern, name in HARDWARE if re.search(pattern, gpu)), None)
    if option is None:
        raise NotExpressedError(f"no hardware group for {gpu}")
    hardware = configs.load([f"hardware={option}"]).hardware
    assert hardware is not None
    if option in HOPPER:
        hardware = replace(hardware, attention_efficiency=FLASH_ATTENTION_2)
    name = row["id"].split("-")[0]
    if name in ATTENTION:
        hardware = replace(hardware, attention_efficiency=ATTENTION[name])
    gbit = NODE_GBIT_S.get(name)
    if gbit is not None:
        assert hardware.devices_per_node is not None
        hardware = replace(hardware, network_gb_s=gbit / 8 / hardware.devices_per_node)
    return hardware, option


def _model(row: dict[str, Any]) -> list[str]:
    for key in ("num_experts", "mla", "encoder_layers", "mtp_layers"):
        if row.get(key):
            raise NotExpressedError("not a model of ours (experts, encoders, latent attention)")
    for key in ("layers", "hidden", "heads", "ffn", "seq_len"):
        if not row.get(key):
            raise NotExpressedError(f"{key} not given")
    if ATTENTION.get(row["id"].split("-")[0]) == UNFUSED and row["hidden"] // row["heads"] % 8:
        raise NotExpressedError("unfused attention without tensor cores (odd features of a head)")
    gated = row.get("activation") == "swiglu"
    heads, tensor = row["heads"], row.get("tp") or 1
    vocabulary = -(-(row.get("vocab") or GPT2_VOCABULARY) // (tensor * 128)) * tensor * 128
    overrides = [
        f"model={'llama_debug' if gated else 'gpt'}",
        f"model.hidden_size={row['hidden']}",
        f"model.num_hidden_layers={row['layers']}",
        f"model.num_attention_heads={heads}",
        f"model.intermediate_size={row['ffn']}",
        f"model.vocab_size={vocabulary}",
        f"model.max_position_embeddings={row['seq_len']}",
        f"model.tie_word_embeddings={str(bool(row.get('tied_embeddings', not gated))).lower()}",
        "data=synthetic_tokens",
        f"data.sequence_length={row['seq_len']}",
    ]
    if gated:
        overrides.append(f"model.num_key_value_heads={row.get('kv_heads') or heads}")
    return overrides


def _layout(row: dict[str, Any]) -> list[str]:
    tensor, pipeline, context = (row.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    data, rest = divmod(row["num_gpus"], tensor * pipeline * context)
    if rest:
        raise NotExpressedError("its degrees don't divide its devices")
    overrides = [f"launch.nproc={row['num_gpus']}", f"strategy.tensor.degree={tensor}"]
    if row.get("sequence_parallel") and tensor > 1:
        overrides.append("strategy.tensor.sequence_parallel=true")
    overrides += [f"strategy.context.degree={context}", *_data_parallel(row, data * context)]
    if pipeline > 1:
        overrides += [f"strategy.pipeline.degree={pipeline}", *_schedule(row)]
    return overrides


def _data_parallel(row: dict[str, Any], ranks: int) -> list[str]:
    zero = row.get("zero_stage") or 0
    if str(row.get("offload", "none")) != "none":
        raise NotExpressedError("offload as its source does it")
    if ranks == 1:
        return ["strategy.data_parallel=none"]
    kind = {0: "ddp", 1: "zero1", 2: "fsdp", 3: "fsdp"}[zero]
    overrides = [f"strategy.data_parallel={kind}"]
    replicas = row.get("dp_replicate") or 1
    if zero == 2:
        overrides.append("strategy.fsdp.sharding=shard_grad_op")
    elif zero == 3 and replicas > 1:
        overrides += ["strategy.fsdp.sharding=hybrid_shard", f"strategy.fsdp.replicate={replicas}"]
    if published.divides_among_some(row):
        raise NotExpressedError(published.SOME_DATA_RANKS)
    if _reduces_in_16_bit(row):
        overrides.append("strategy.reduce_dtype=bf16")
    return overrides


def _reduces_in_16_bit(row: dict[str, Any]) -> bool:
    """Return whether gradients are summed in the dtype of half-precision parameters."""
    reported = str(row.get("reduce_dtype") or row.get("grad_dtype") or "")
    if reported:
        return "fp32" not in reported
    pure = str(row.get("param_dtype")) in ("bf16", "fp16")
    return pure or "PURE" in str(row.get("mixed_precision"))


def _schedule(row: dict[str, Any]) -> list[str]:
    reported = str(row.get("pp_schedule") or "1F1B")
    stages = row.get("virtual_stages") or 1
    if reported.startswith("Interleaved"):
        name = "interleaved_1f1b"
    elif reported.startswith("1F1B"):
        name, stages = "1f1b", 1
    else:
        raise NotExpressedError(f"schedule {reported}")
    if row["layers"] < stages * row["pp"]:
        raise NotExpressedError("a stage without a layer")
    return [
        f"strategy.pipeline.schedule={name}",
        f"strategy.pipeline.stages_per_rank={stages}",
        *_split(row, stages * row["pp"]),
    ]


def _split(row: dict[str, Any], stages: int) -> list[str]:
    """Return the layers of each stage of software that does not count the work of ends."""
    layers, source = row["layers"], row["id"].split("-")[0]
    if source in EVEN_STAGES and layers % stages == 0:
        counts = [layers // stages] * stages
    elif source == "zb":  # "first/last stage hold one layer fewer"
        most, rest = divmod(layers + 2, stages)
        if rest:
            raise NotExpressedError("ends count as a layer each, and its stages are not equal then")
        counts = [most - 1, *[most] * (stages - 2), most - 1]
    else:
        return []
    return [f"strategy.pipeline.split={counts}"]


def _training(row: dict[str, Any]) -> list[str]:
    precision = _precision(row)
    size = row.get("micro_batch_size") or row.get("local_batch_size")
    if not size:
        raise NotExpressedError("micro-batch not given")
    if row.get("finetune") or row.get("packed") is False:
        raise NotExpressedError("lengths of samples not given")
    if re.search(r"bit|bnb", str(row.get("optimizer"))) or row.get("optimizer_in_bwd"):
        raise NotExpressedError("another optimizer")
    ranks = row["num_gpus"] // ((row.get("tp") or 1) * (row.get("pp") or 1) * (row.get("cp") or 1))
    full = row.get("global_batch_size") or size * ranks * (row.get("grad_accum") or 1)
    compiled = row.get("torch_compile")
    if isinstance(compiled, str):
        if "thunder" in compiled:
            raise NotExpressedError("another compiler")
        compiled = False
    return [
        *_stored(row, precision),
        f"train.precision={precision}",
        f"train.micro_batch_size={size}",
        f"train.global_batch_size={full}",
        f"train.activation_checkpointing={_checkpointing(row)}",
        f"train.compile={str(bool(compiled)).lower()}",
        f"train.matmul_dtype={_products(row, is_compiled=bool(compiled))}",
    ]


def _stored(row: dict[str, Any], precision: str) -> list[str]:
    """Return how weights are stored: in fp32, or in 16 bits beside fp32 masters."""
    if published.masters(row) != "fp32":
        return []
    reported = f"{row.get('grad_dtype')} {row.get('mixed_precision')}"
    sums_in_fp32 = "fp32" in reported
    return [
        f"train.param_dtype={precision}",
        "optimizer.master_weights=fp32",
        f"train.grad_dtype={'fp32' if sums_in_fp32 else 'parameter'}",
    ]


def _products(row: dict[str, Any], *, is_compiled: bool) -> str:
    """Return the format of products, which in 8 bits is that of torchao's compiled recipes."""
    texts = [str(row.get(key, "")).lower() for key in ("linear_precision", "float8_linear", "fp8")]
    in_8_bits = [text for text in texts if text == "true" or re.search(r"fp8|float8|fp4", text)]
    if not in_8_bits:
        return "null"
    is_torchao = row["id"].split("-")[0] in ("tt", "ao")
    if not is_torchao or not is_compiled or row.get("async_tp"):
        raise NotExpressedError("8-bit products of other software, or not compiled")
    return "fp8_rowwise" if "rowwise" in in_8_bits[0] else "fp8_tensorwise"


def _precision(row: dict[str, Any]) -> str:
    text = f"{row.get('param_dtype')} {row.get('mixed_precision')}".lower()
    return "fp16" if "fp16" in text and "bf16" not in text else "bf16"


def _checkpointing(row: dict[str, Any]) -> str:
    reported = str(row.get("ac_mode", ""))
    for start, mode in (("none", "none"), ("full", "full"), ("selective per-op", "selective")):
        if reported.startswith(start):
            return mode
    raise NotExpressedError(f"recomputation {reported or 'not given'}")
