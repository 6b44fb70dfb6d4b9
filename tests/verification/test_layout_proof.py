"""A layout is proved once on a small model before the first step; a difference prevents the
start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configured import run_config
from support.hf_families import without_folder
from torch import Tensor, nn

from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.options.data import SyntheticTokensConfig
from axonlaunch.engines.tensor.parallel_layers import fused_region, layers
from axonlaunch.models.hf.analysis import reduced
from axonlaunch.verification.proofs import layout_proof
from axonlaunch.verification.proofs.runner import is_to_be_proved

Patch = pytest.MonkeyPatch
TENSOR = ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"]
FSDP = ["strategy=fsdp", "launch.nproc=2"]
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.fixture(autouse=True)
def _nothing_was_proved(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(kind: str, *overrides: str, **changes: Any) -> RunConfig:
    return run_config(without_folder(kind, *overrides, **changes))


@pytest.mark.slow
def test_layout_is_proved_once_for_models_that_differ_only_in_size() -> None:
    assert layout_proof.preview(run("qwen3", *FSDP)).outcome == "to be proved"
    assert layout_proof.prove(run("qwen3", *FSDP)).outcome == "proved"
    assert layout_proof.prove(run("qwen3", *FSDP, num_hidden_layers=3)).outcome == "proved before"
    assert layout_proof.preview(run("qwen3", *FSDP, **WIDE)).outcome == "proved before"
    assert layout_proof.prove(run("qwen3", *FSDP, "train.prove=always")).outcome == "proved"
    others = run("qwen3", "strategy=zero1", "launch.nproc=2"), run("qwen2", *FSDP)
    assert [layout_proof.preview(other).outcome for other in others] == ["to be proved"] * 2


@pytest.mark.slow
def test_rows_of_several_documents_are_proved_with_such_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n' * 40)
    overrides = [
        "data=documents",
        f"data.files=[{tmp_path / 'rows.jsonl'}]",
        "data.sequence_length=16",
    ]
    config = run("qwen3", *FSDP, *overrides, "train.global_batch_size=2", vocab_size=256)
    data = layout_proof.reduced(config).data
    assert isinstance(data, SyntheticTokensConfig)
    assert data.document_length is not None
    assert layout_proof.prove(config).outcome == "proved"
    alone = run(
        "qwen3", *FSDP, *overrides, "data.packing=none", "train.global_batch_size=2", vocab_size=256
    )
    assert layout_proof.preview(alone).outcome == "to be proved"


def test_a_proof_is_of_one_version_of_the_code(monkeypatch: Patch) -> None:
    assert layout_proof.prove(run("qwen3", *FSDP)).outcome == "proved"
    monkeypatch.setattr(layout_proof, "version", lambda package: f"another {package}")
    assert layout_proof.preview(run("qwen3", *FSDP)).outcome == "to be proved"


def test_small_model_has_rows_that_all_parts_of_sequence_divide() -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}
    layout = ["strategy=tensor", "strategy.tensor.degree=3", "launch.nproc=3"]
    parts = [*layout, "strategy.tensor.sequence_parallel=true", "data.sequence_length=24"]
    small = layout_proof.reduced(
        run("llama", *parts, vocab_size=258, intermediate_size=96, **heads)
    )
    assert small.sequence_length == 33


def test_many_ranks_are_proved_by_two_on_each_axis() -> None:
    overrides = ["strategy.tensor.degree=4", "strategy.pipeline.degree=4", "launch.nproc=64"]
    large = run("llama", "strategy=hybrid", *overrides, num_hidden_layers=8, num_key_value_heads=4)
    of_gpus = {"train.attention_kernel": "flash", "strategy.tensor.async_collectives": True}
    small = layout_proof.reduced(with_values(large, {"train.precision": "bf16", **of_gpus}))
    layout = Layout.of(small, world_size=num_ranks(small))
    divided = {axis: size for axis, size in layout.axes.items() if size > 1}
    assert divided == {"pp": 2, "dp_shard": 2, "tp": 2}
    assert small.train.precision == "fp32"
    assert small.train.attention_kernel == "auto"
    assert not small.strategy.tensor.async_collectives


def a_row_parallel_layer_is_scaled(patch: Patch) -> None:
    right = layers.RowParallelLinear.forward
    patch.setattr(layers.RowParallelLinear, "forward", lambda self, x: 1.01 * right(self, x))


def gradients_of_inputs_are_not_summed(patch: Patch) -> None:
    patch.setattr(fused_region, "start_sum", lambda x, group: x)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("fault", "module"),
    [
        (a_row_parallel_layer_is_scaled, "model.layers.0.self_attn.o_proj"),
        (gradients_of_inputs_are_not_summed, "model.norm"),
    ],
)
def test_wrong_layout_is_refused_with_first_wrong_module(
    fault: Any, module: str, monkeypatch: Patch
) -> None:
    large = run("llama", *TENSOR)
    fault(monkeypatch)
    with pytest.raises(
        ConfigError, match="tensor 2 and one process compute different results"
    ) as no:
        layout_proof.prove(large)
    assert f"the first module that differs is {module};" in str(no.value)
    with pytest.raises(ConfigError):  # and nothing is cached
        layout_proof.prove(large)


def test_model_without_reduced_form_is_refused_with_alternative(monkeypatch: Patch) -> None:
    monkeypatch.setattr(reduced, "LARGEST_SMALL_MODEL", 10)
    result = layout_proof.prove(run("llama", *FSDP))
    assert result.outcome == "not proved"
    assert "axonlaunch verify with the same arguments proves it" in str(result)


@pytest.mark.parametrize(
    ("overrides", "due"),
    [
        (["model=gpt", *FSDP], False),
        (["model=gpt", "train.prove=always", *FSDP], True),
        (["model=gpt", "train.prove=always", "strategy=single"], False),
        ([*without_folder("llama"), *FSDP], True),
        ([*without_folder("llama"), "strategy=single"], False),
        ([*without_folder("llama"), "train.prove=never", *FSDP], False),
    ],
)
def test_proof_kinds(overrides: list[str], due: bool) -> None:
    assert is_to_be_proved(run_config(overrides)) is due


def test_custom_model_is_proved_unchanged() -> None:
    overrides = [
        "model=gpt",
        "model.num_hidden_layers=2",
        "model.hidden_size=32",
        "train.prove=always",
    ]
    assert layout_proof.prove(run_config([*overrides, *TENSOR])).outcome == "proved"


class Untrained(nn.Module):
    """Outputs that depend on no parameter, so that no layout could differ."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1)) * 0.0


@pytest.mark.slow
def test_a_model_that_nothing_can_be_proved_of_is_trained_unproved() -> None:
    overrides = ["model=custom", f"model.target={__name__}:Untrained", "data=digits"]
    config = run_config([*overrides, "strategy=ddp", "launch.nproc=2", "train.prove=always"])
    reported = layout_proof.prove(config)
    assert reported.outcome == "not proved"
    assert "no parameter" in reported.reason
