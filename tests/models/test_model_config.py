import ast
import dataclasses
import inspect

import pytest

import axonlaunch.config.options.data as data_config
import axonlaunch.config.options.model as model_config
from axonlaunch.config.options.model import CustomConfig, GPTConfig, LlamaConfig, ViTConfig


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (
            LlamaConfig(num_attention_heads=3),
            "num_attention_heads",
            "hidden_size=128 is not divisible by it; use 1, 2, 4, 8, 16, 32, 64 or 128",
        ),
        (
            LlamaConfig(hidden_size=36, num_attention_heads=4, num_key_value_heads=4),
            "num_attention_heads",
            "hidden_size=36 makes heads of 9 numbers, and rotary positions need an even number; "
            "change either",
        ),
        (
            LlamaConfig(num_key_value_heads=3),
            "num_key_value_heads",
            "num_attention_heads=8 is not divisible by it; use 1, 2, 4 or 8",
        ),
        (
            ViTConfig(patch_size=5),
            "patch_size",
            "image_size=28 is not divisible by it; use 1, 2, 4, 7, 14 or 28",
        ),
        (CustomConfig(target="build"), "target", "is not of the form package.module:build"),
    ],
)
def test_inconsistent_model_sizes_are_reported(config, field, message):
    assert config.problems() == [(field, message)]


def test_consistent_model_sizes_have_no_problems():
    for config in (GPTConfig(), LlamaConfig(), ViTConfig(), CustomConfig(target="a.b:c")):
        assert config.problems() == []


@pytest.mark.parametrize("module", [model_config, data_config])
def test_every_model_config_field_has_description(module):
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                text = getattr(getattr(below, "value", None), "value", None)
                assert isinstance(text, str), f"{node.name}.{field.target.id}"
                assert "\n" not in text


@pytest.mark.parametrize(
    "configs",
    [model_config.MODELS.configs(), data_config.DATASETS.configs()],
    ids=["model", "data"],
)
def test_model_names_match_dataclasses(configs):
    for name, config in configs.items():
        assert config.__dataclass_params__.frozen
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        assert defaults["name"] == name
