"""Which causal language models of transformers each layout trains as one process does.

Every class is built at a tiny configuration and proved as ``axonlaunch verify`` does, each layout
in a process of its own with a time limit; what can't be built so is reported with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, list[str]] = {
    "fsdp 2": ["strategy=fsdp", "launch.nproc=2"],
    "tensor 2": ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"],
    "tensor 4": ["strategy=tensor", "strategy.tensor.degree=4", "launch.nproc=4"],
    "pipeline 2": ["strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"],
    "zero bubble 2": [
        *("strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"),
        "strategy.pipeline.schedule=zbv_zero_bubble",
    ],
    "context 2": ["strategy=ddp", "strategy.context.degree=2", "launch.nproc=2"],
    "hybrid 2x2x2": [
        *("strategy=hybrid", "strategy.tensor.degree=2", "strategy.pipeline.degree=2"),
        "launch.nproc=8",
    ],
}
"""What is proved of each class, by its column's name: the settings."""

BLOCKS = 4
"""So many make the four stages of a zero-bubble pipeline on two ranks."""

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 16,
    "num_kv_shared_layers": 0,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "laurel_rank": 16,
    "num_experts_per_token": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "rotary_dim": 8,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Tiny figures by what most configurations call them; a class is given those that it has."""

OWN: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 64},
    "longcat_flash": {"head_dim": 8},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * (BLOCKS // 2),
        "num_dense_layers": 1,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], BLOCKS // 2]], "window_size": 16},
}
"""Besides, for the configurations where these make no model."""

SETTINGS = [
    *("model=hf", "model.init=random", "data=synthetic_tokens", "data.sequence_length=32"),
    *("train.global_batch_size=4", "train.steps=10", "scheduler=constant"),
    *("optimizer.lr=3e-3", "optimizer.eps=1e-6", "checkpoint.every=0"),
]
STEPS = 3


@dataclass(frozen=True)
class Row:
    """What was found of a class under a layout.

    Attributes:
        model_type: Its configuration's.
        layout: As ``LAYOUTS`` names it.
        outcome: equal, different, refused (before anything starts), failed or late.
        reason: Why not equal, in words.
    """

    model_type: str
    layout: str
    outcome: str
    reason: str = ""


def model_types() -> list[str]:
    """Return the first ``model_type`` of each causal-LM class."""
    from axonlaunch.models.hf import library

    first: dict[str, str] = {}
    for kind, cls in library.causal_types().items():
        first.setdefault(str(cls), kind)
    return sorted(first.values())


def tiny(kind: str) -> dict[str, Any]:
    """Return a configuration of a family that makes a model of some thousand parameters."""
    from axonlaunch.models.hf import architecture, library

    cls = library.config_types()[kind]
    known = architecture.known_keys(cls) | library.keys_read_by_code(cls)
    settable = {key for key in known if not isinstance(_found(cls, key), property)}
    figures = {key: value for key, value in SIZES.items() if key in settable}
    if "qk_rope_head_dim" in figures:
        figures.pop("head_dim", None)  # it follows, and every head has keys and values
        figures["num_key_value_heads"] = figures["num_attention_heads"]
    with library.quiet():
        defaults = cls()
    depth = getattr(defaults, "num_hidden_layers", None)
    for key in settable - figures.keys():
        value = _found(defaults, key)
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            figures[key] = 0.0
        elif isinstance(value, list) and len(value) == depth:
            figures[key] = _spread(value)
    return {"model_type": kind, **figures, **OWN.get(kind, {})}


def _found(owner: Any, key: str) -> Any:
    """Return an attribute under any name that it has; None where it has no one value."""
    attribute = getattr(owner, "attribute_map", {}).get(key, key)
    try:
        return getattr(owner, attribute, None)
    except Exception:  # a configuration may hold a value for each layer
        return None


def _spread(value: list[Any]) -> list[Any]:
    """Return a list that has an entry for each block: of two kinds in turn, if there are two."""
    other = next((one for one in value if one != value[0]), value[0])
    return [value[0], other] * (BLOCKS // 2)


def prove(kind: str, layout: str) -> Row:
    """Train a class in a layout and in one process, and compare."""
    from axonlaunch import config as configuration
    from axonlaunch.config import ConfigError
    from axonlaunch.config.errors import plain
    from axonlaunch.preflight import checks
    from axonlaunch.verification.compare import on_mock

    try:
        words = [*SETTINGS, f"model.config={plain(tiny(kind))}", *LAYOUTS[layout]]
        composed = configuration.compose(words)
        typed = configuration.typed(composed.tree, composed.problems, origins=composed.origins)
        chosen = checks.resolve(typed)
        found = on_mock(chosen, STEPS)
    except ConfigError as error:
        return Row(kind, layout, "refused", "; ".join(map(str, error.problems)))
    if found.passed:
        return Row(kind, layout, "equal")
    return Row(kind, layout, "different", found.failure or "; ".join(found.differences[:2]))


def _in_process(kind: str, layout: str, answers: Connection) -> None:
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        row = prove(kind, layout)
    except Exception as error:  # what a model's own code raises is a result
        row = Row(kind, layout, "failed", f"{type(error).__name__}: {str(error)[:300]}")
    answers.send(asdict(row))


def rows(kinds: list[str], layouts: list[str], *, seconds: float) -> Iterator[Row]:
    """Yield what is found of each class under each layout."""
    from axonlaunch.models.hf import library

    library.transformers()  # before the fork, once for all
    importlib.import_module("axonlaunch.verification.compare")
    context = multiprocessing.get_context("fork")
    for kind in kinds:
        for layout in layouts:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_in_process, args=(kind, layout, there))
            process.start()
            there.close()
            row = Row(kind, layout, "late", f"took more than {seconds:.0f} s")
            if here.poll(seconds):
                try:
                    row = Row(**here.recv())
                except EOFError:
                    row = Row(kind, layout, "failed", "its process died")
            process.kill()
            process.join()
            yield row


def main() -> None:
    """Print a line for each class and layout; with --json, one that programs read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", default=None)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for one class and layout")
    parser.add_argument("--json", type=Path, default=None, help="a file for the rows")
    chosen = parser.parse_args()
    found = []
    for row in rows(chosen.only or model_types(), chosen.layouts, seconds=chosen.seconds):
        found.append(row)
        print(f"{row.model_type:24} {row.layout:13} {row.outcome:10} {row.reason}", flush=True)
    for layout in chosen.layouts:
        equal = sum(one.outcome == "equal" for one in found if one.layout == layout)
        print(f"{layout}: {equal} of {sum(one.layout == layout for one in found)}")
    if chosen.json is not None:
        chosen.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))


if __name__ == "__main__":
    main()
