"""Tensor-parallel models of transformers: saved, resumed, exported, estimated, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import estimate_config, run_config
from support.hf_families import FAMILIES, save
from support.rank_engine import rank_engine

import axonlaunch.engines.tensor.parallelize as dividing
from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.config.problems.errors import plain
from axonlaunch.engines.tensor.division_check import division_problem
from axonlaunch.engines.tensor.parallel_layers.layer_detection import is_embedding, linear_sizes
from axonlaunch.models.hf.analysis import tensor_plans
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.analysis.tensor_plans import tensor_plan
from axonlaunch.models.tensors.dtensor_regions import full_tensor

SETTINGS = [
    *("model=hf", "model.init=random", "data=synthetic_tokens", "data.sequence_length=16"),
    *("train.global_batch_size=4", "train.steps=10", "scheduler=constant", "optimizer.eps=1e-6"),
]
TENSOR = ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"]
FSDP = ["strategy=fsdp", "launch.nproc=2"]


def family(kind: str, **changes: Any) -> str:
    return f"model.config={plain({**FAMILIES[kind], **changes})}"


def problems(kind: str, *overrides: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        run_config([*SETTINGS, family(kind, **changes), *overrides])
    return str(refused.value)


def on_ranks(overrides: list[str], work: Any) -> list[Any]:
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"
    return World.mock(chosen.launch.nproc).run(
        lambda world: work(*rank_engine(chosen, world), world)
    )


def saved_by(overrides: list[str], folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train two steps, save, train on; return the saved state and the later losses."""

    def write(engine: Any, loader: Any, world: World) -> Any:
        for step in range(2):
            engine.train_step(loader.batch(step))
        state = engine.state_dict()
        Saver(folder, world=world, retention=Retention(newest=1)).save(state, step=2, samples=8)
        parameters = {name: full_tensor(tensor).clone() for name, tensor in state["model"].items()}
        return parameters, [float(engine.train_step(loader.batch(step)).loss) for step in (2, 3)]

    return on_ranks(overrides, write)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), [(TENSOR, FSDP), (FSDP, TENSOR)])
def test_a_run_resumes_between_tensor_and_sharded_layouts(
    writer: list[str], reader: list[str], tmp_path: Path
) -> None:
    kind = family("qwen3_moe")
    states, losses = saved_by([kind, *writer], tmp_path)

    def resume(engine: Any, loader: Any, world: World) -> Any:
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        engine.load_state_dict(checkpoint.load_checkpoint(newest, engine.state_dict(), world=world))
        parameters = {
            name: full_tensor(t).clone() for name, t in engine.state_dict()["model"].items()
        }
        return parameters, [float(engine.train_step(loader.batch(step)).loss) for step in (2, 3)]

    loaded, resumed = on_ranks([kind, *reader], resume)[0]
    assert loaded.keys() == states.keys()
    for name, tensor in states.items():
        assert torch.equal(loaded[name], tensor), name
    assert resumed == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_transformers_loads_export_of_tensor_parallel_run(tmp_path: Path) -> None:
    import transformers

    overrides = [family("mixtral"), *TENSOR]
    states, _ = saved_by(overrides, tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    chosen = run_config([*SETTINGS, *overrides])
    weights.export_weights(newest, chosen, tmp_path / "out")
    reloaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = dict(reloaded.named_parameters())
    assert loaded.keys() == states.keys()
    for name, tensor in states.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.slow
def test_a_layout_that_divides_layers_is_estimated_with_less_memory() -> None:
    from axonlaunch.planning.memory.estimate import estimate

    def peak(*overrides: str) -> int:
        common = [*SETTINGS, family("llama"), "hardware=cpu", "train.micro_batch_size=1"]
        return int(estimate(estimate_config([*common, *overrides])).peak_bytes)

    assert peak(*TENSOR) < 0.7 * peak("strategy=ddp", "launch.nproc=2")


@pytest.mark.parametrize(
    ("kind", "changes", "degree", "expected"),
    [
        ("gpt2", {}, 3, "num_heads=4 cannot be sharded over 3 ranks; use 1, 2 or 4"),
        ("llama", {}, 8, "heads of q_proj=4 cannot be sharded over 8 ranks; use 1, 2 or 4"),
        (
            "qwen2",
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8},
            2,
            "heads of q_proj=12 cannot be sharded over 2 ranks; use 1, 3, 6 or 12",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 33},
            2,
            "gate_up_proj has size 66 in dim 1, which 2",
        ),
    ],
)
def test_invalid_tensor_degree_is_refused_with_valid_ones(
    kind: str, changes: dict[str, Any], degree: int, expected: str
) -> None:
    layout = [
        "strategy=tensor",
        f"strategy.tensor.degree={degree}",
        f"launch.nproc={degree}",
    ]
    messages = problems(kind, *layout, **changes)
    assert f"strategy.tensor.degree={degree}: " in messages
    assert expected in messages


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_fixed_head_counts_are_refused_before_start(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyzed = structure(HuggingFaceConfig(config=FAMILIES[kind], init="random"))
    plan = tensor_plan(analyzed.copy(), analyzed.layers)
    assert division_problem(analyzed.copy(), plan, degree=2) is None
    monkeypatch.setattr(dividing, "set_local_head_counts", lambda *_, **__: None)
    wrong = division_problem(analyzed.copy(), plan, degree=2)
    assert wrong is not None
    assert wrong.partition(" fails with ")[0].endswith(("h.0.attn", "layers.0.self_attn"))


@pytest.mark.parametrize("corrected", [True, False])
def test_learned_slopes_on_feature_shards_are_refused_before_start(
    corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' plan of Apertus omits them, so each rank would learn different slopes."""
    if not corrected:
        monkeypatch.setattr(tensor_plans, "_CORRECTIONS", {})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    figures = {"model_type": "apertus", **sizes, **heads, "pad_token_id": None}
    analyzed = structure(HuggingFaceConfig(config=figures, init="random"))
    plan = tensor_plan(analyzed.copy(), analyzed.layers)
    wrong = division_problem(analyzed.copy(), plan, degree=2)
    if corrected:
        assert wrong is None
    else:
        assert wrong is not None
        assert wrong.startswith("model.layers.0.mlp.act_fn has parameters that the plan does not")


def test_linear_subclasses_count_as_linear() -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
    from transformers.pytorch_utils import Conv1D

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    conv, linear = linear_sizes(Conv1D(nf=6, nx=4)), linear_sizes(FalconLinear(4, 6))
    assert conv is not None
    assert linear is not None
    assert (conv.inputs, conv.outputs, conv.transposed) == (4, 6, True)
    assert (linear.inputs, linear.outputs, linear.transposed) == (4, 6, False)
    assert linear_sizes(Doubled(4, 6)) is None
    assert is_embedding(Gemma3TextScaledWordEmbedding(5, 4, padding_idx=0, embed_scale=3.0))
    assert not is_embedding(OPTLearnedPositionalEmbedding(5, 4))


def test_a_plan_cuts_experts_and_shares_key_value_heads() -> None:
    analyzed = structure(HuggingFaceConfig(config=FAMILIES["qwen3_moe"], init="random"))
    plan = tensor_plan(analyzed.copy(), analyzed.layers)
    assert plan == {
        "model.layers.*.self_attn.q_proj": "column",
        "model.layers.*.self_attn.k_proj": "key_value",
        "model.layers.*.self_attn.v_proj": "key_value",
        "model.layers.*.self_attn.q_norm": "replicated_summed",
        "model.layers.*.self_attn.k_norm": "replicated_summed",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.self_attn": "region",
        "model.layers.*.mlp.experts.gate_up_proj": "packed_column",
        "model.layers.*.mlp.experts.down_proj": "row",
        "model.layers.*.mlp.experts": "experts",
        "model.embed_tokens": "vocabulary",
        "lm_head": "vocabulary",
        "model.layers.*.mlp": "full_sequence",
        "model.layers.*.input_layernorm": "sequence",
        "model.layers.*.post_attention_layernorm": "sequence",
        "model.norm": "sequence",
    }


def test_saved_weights_load_into_expert_shards(tmp_path: Path) -> None:
    expected = dict(save("mixtral", tmp_path).named_parameters())

    def start(engine: Any, loader: Any, world: World) -> Any:
        del loader
        weights.load_initial_weights(engine, chosen.model, world=world)
        return {name: full_tensor(t).clone() for name, t in engine.state_dict()["model"].items()}

    overrides = [*SETTINGS[:1], *SETTINGS[2:], f"model.path={tmp_path}", *TENSOR]
    chosen = run_config(overrides)
    read = World.mock(2).run(lambda world: start(*rank_engine(chosen, world), world))[0]
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name
