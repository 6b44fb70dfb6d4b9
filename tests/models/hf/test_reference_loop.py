"""A plain training loop with only transformers gives the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hf_families import FAMILIES, save
from support.hf_loops import by_axonlaunch, by_transformers

LAYOUTS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp", "launch.nproc=2"],
    "zero1": ["strategy=zero1", "launch.nproc=2"],
    "zero2": ["strategy=zero2", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=2"],
    "hsdp": ["strategy=hsdp", "launch.nproc=4", "strategy.fsdp.replicate=2"],
    "full": ["strategy=fsdp", "launch.nproc=2", "train.activation_checkpointing=full"],
    "selective": ["strategy=ddp", "launch.nproc=2", "train.activation_checkpointing=selective"],
    "offload": ["strategy=fsdp", "launch.nproc=2", "strategy.fsdp.cpu_offload=params"],
    "hybrid": [
        *("strategy=hybrid", "launch.nproc=8", "strategy.tensor.degree=2"),
        *("strategy.pipeline.degree=2", "train.micro_batch_size=1"),
    ],
}


# OPT's block reshapes its result; the next one adds to it out of place.
@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPOPTDecoderLayer. returned a view")
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_learns_under_fsdp_as_in_a_plain_loop(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, LAYOUTS["fsdp"]) == pytest.approx(expected, rel=2e-5)
    assert max(expected) - min(expected) > 1e-2  # the weights have moved


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_learns_under_tensor_parallelism_as_in_a_plain_loop(
    kind: str, tmp_path: Path
) -> None:
    save(kind, tmp_path)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, tensor(2)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "qwen3_moe"])
def test_fewer_key_value_heads_than_ranks_are_shared(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, tensor(4)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["fsdp", "zero1"])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_tensor_and_data_parallelism_learn_together_as_a_plain_loop(
    kind: str, data_parallel: str, tmp_path: Path
) -> None:
    save(kind, tmp_path)
    expected = by_transformers(tmp_path)
    both = [f"strategy={data_parallel}", "strategy.tensor.degree=2", "launch.nproc=4"]
    assert by_axonlaunch(tmp_path, both) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["pipeline", "context"])
def test_gpt2_learns_under_tensor_parallelism_and_another_axis_as_in_a_plain_loop(
    other: str, tmp_path: Path
) -> None:
    save("gpt2", tmp_path)
    expected = by_transformers(tmp_path)
    both = ["strategy=tensor", "strategy.tensor.degree=2", f"strategy.{other}.degree=2"]
    assert by_axonlaunch(tmp_path, [*both, "launch.nproc=4"]) == pytest.approx(expected, rel=2e-5)


def tensor(degree: int) -> list[str]:
    return ["strategy=tensor", f"strategy.tensor.degree={degree}", f"launch.nproc={degree}"]


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPOPTDecoderLayer. returned a view")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("gemma2", layout) for layout in LAYOUTS),
        *((kind, "hybrid") for kind in FAMILIES if kind != "gemma2"),
    ],
)
def test_every_layout_learns_as_a_plain_loop(kind: str, layout: str, tmp_path: Path) -> None:
    save(kind, tmp_path, num_hidden_layers=4)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, LAYOUTS[layout]) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_auxiliary_loss_equals_transformers(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, output_router_logits=True, router_aux_loss_coef=0.5)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, LAYOUTS["single"]) == pytest.approx(expected, rel=2e-5)
    assert by_axonlaunch(tmp_path, tensor(2)) == pytest.approx(expected, rel=2e-5)
    without = by_axonlaunch(tmp_path, LAYOUTS["single"], "model.config.output_router_logits=false")
    assert without[0] < expected[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scales"),
    [
        (
            "Granite",
            {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        ),
        ("Cohere", {"logit_scale": 0.25, "eos_token_id": 1}),
    ],
    ids=["granite", "cohere"],
)
def test_logit_scaling_applies_to_vocabulary_shards(
    kind: str, scales: dict[str, float], tmp_path: Path
) -> None:
    import transformers

    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **scales)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    losses = by_axonlaunch(tmp_path, tensor(2), "train.loss_chunk=16")
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)
