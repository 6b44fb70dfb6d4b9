"""Estimates equal the memory of real ranks, to the byte, for combinations that are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st
from support import live_storages
from support.configured import estimate_config
from support.hf_families import FAMILIES
from support.live_storages import small

from axonlaunch.config import ConfigError
from axonlaunch.planning.memory.estimate import estimate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server")]

RANKS = 2
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    **{kind: FAMILIES[kind] for kind in ("llama", "qwen3", "gemma2", "phi3", "olmo2", "gpt_neox")},
    "stablelm": {**FAMILIES["llama"], "model_type": "stablelm", "rope_parameters": None},
    "arcee": {**FAMILIES["llama"], **TIED, "model_type": "arcee"},
    "smollm3": {**FAMILIES["qwen2"], **TIED, "model_type": "smollm3", "pad_token_id": 0},
    "exaone4": {**FAMILIES["mistral"], "model_type": "exaone4", "head_dim": 16},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")
LAYOUTS = [
    *("strategy=ddp", "strategy=zero1", "strategy=fsdp", "strategy=zero2", "strategy=tensor"),
    "strategy=tensor strategy.tensor.sequence_parallel=true",
    "strategy=fsdp strategy.fsdp.cpu_offload=optimizer_states",
    *(
        f"strategy=pipeline strategy.pipeline.degree=2 strategy.pipeline.schedule={schedule}"
        for schedule in SCHEDULES
    ),
]
ADAPTERS = ["", "adapter=lora", "adapter=lora adapter.dora=true adapter.targets=[q_proj,down_proj]"]
OPTIMIZERS = ["", "optimizer=sgd optimizer.momentum=0.9", "optimizer=adafactor", "optimizer=lion"]
SETTINGS = [
    "",
    "train.micro_batch_size=2",
    "train.precision=bf16",
    "train.precision=bf16 train.param_dtype=bf16",
    "train.loss_chunk=24",
    "train.activation_checkpointing=full",
    "train.activation_checkpointing=selective train.micro_batch_size=1",
]


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking would train many more models
    suppress_health_check=list(HealthCheck),
)
@given(
    kind=st.sampled_from(sorted(MODELS)),
    layout=st.sampled_from(LAYOUTS),
    adapter=st.sampled_from(ADAPTERS),
    optimizer=st.sampled_from(OPTIMIZERS),
    setting=st.sampled_from(SETTINGS),
)
def test_estimate_equals_memory_of_ranks_for_drawn_runs(
    kind: str,
    layout: str,
    adapter: str,
    optimizer: str,
    setting: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder: Path = tmp_path_factory.mktemp(kind)
    content = {**MODELS[kind], "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(content))
    words = [*layout.split(), *adapter.split(), *optimizer.split(), *setting.split()]
    case = ("model=hf", f"model.path={folder}", "model.init=random", *words)
    try:
        chosen = estimate_config([*small(case), f"launch.nproc={RANKS}", "hardware=cpu", *case])
    except ConfigError:
        assume(False)  # a combination that is refused before it starts
    stages = estimate(chosen).ranks
    [of_ranks] = live_storages.held([case], ranks=RANKS)
    expected = [rank.peak_bytes for rank in stages for _ in range(RANKS // len(stages))]
    assert [held["total"] for held in of_ranks] == expected, f"{kind}: {' '.join(words)}"
