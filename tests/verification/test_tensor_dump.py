"""Both sides of a comparison store full tensors under the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.configured import run_config
from support.parity_table import MODELS

from axonlaunch.models.build import build_model
from axonlaunch.verification.locating import locate, tensor_dump
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

CUT = ["strategy.tensor.degree=2", "strategy.pipeline.degree=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=tensor", *CUT, "launch.nproc=4"],
        ["strategy=fsdp", "launch.nproc=2", "strategy.context.degree=2"],
    ],
    ids=" ".join,
)
def test_both_dump_files_have_full_tensors(overrides: list[str], tmp_path: Path) -> None:
    config = run_config(
        [*MODELS["llama"], *overrides, "train.global_batch_size=4", "model.num_hidden_layers=2"]
    )
    locate.locate_difference(config, ComparisonPlan(steps=2), tmp_path)
    plain, layout = (
        load_file(tmp_path / name) for name in (tensor_dump.ONE_PROCESS, tensor_dump.LAYOUT)
    )
    assert plain.keys() == layout.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(layout[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    expected = {name for name, _ in build_model(config.model, seed=0).named_parameters()}
    for kind in ("gradient", "parameter"):
        names = {name.removeprefix(f"step2/{kind}/") for name in plain if f"step2/{kind}/" in name}
        assert names == expected
    batch, length = 4, config.data.sequence_length
    for module in ("layers.1.self_attn.o_proj", "layers.0.mlp.gate_proj", "embed_tokens"):
        for kind in ("output", "output_gradient"):
            assert plain[f"step1/{kind}/{module}"].shape[:2] == (batch, length)
