import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from axonlaunch.config.options.model import CustomConfig, FreeModelConfig
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.config.registry import EntryPointError, UnknownNameError
from axonlaunch.models import MODELS, register_model
from axonlaunch.models.build import build_model, spec_for


@dataclass(frozen=True, kw_only=True)
class WideConfig:
    name: str = "wide"
    width: int = 3


def test_a_class_with_a_dataclass_joins():
    @register_model("wide", config=WideConfig, layers="blocks", inputs="images")
    class Wide(nn.Module):
        """A wide model.

        More of it.
        """

        def __init__(self, config: WideConfig):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(2))

    assert MODELS.configs()["wide"] is WideConfig
    assert MODELS.summaries()["wide"] == "A wide model."
    config = WideConfig(width=5)
    spec, model = spec_for(config), build_model(config)
    assert isinstance(model, Wide)
    assert list(spec.blocks(model)) == ["blocks.0", "blocks.1"]
    assert spec.inputs == "images"


def test_a_function_without_a_dataclass_takes_the_arguments():
    @register_model("narrow", summary="a narrow one")
    def narrow(width: int = 2) -> nn.Module:
        return nn.Linear(width, 1)

    assert MODELS.configs()["narrow"] is FreeModelConfig
    model = build_model(FreeModelConfig(name="narrow", arguments={"width": 7}))
    assert model.in_features == 7


def test_self_initializing_model_is_equal_on_all_ranks():
    register_model("narrow")(lambda: nn.Linear(9, 9))
    config = FreeModelConfig(name="narrow")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(config, seed=5).weight
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(7)
    assert torch.equal(first, build_model(config, seed=5).weight)
    assert not torch.equal(first, build_model(config, seed=6).weight)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="model 'gpt' is registered already"):
        register_model("gpt")(nn.Linear)


def test_a_decorator_without_a_name_is_refused():
    with pytest.raises(
        TypeError, match=r'register_model needs a name: @ax.register_model\("name"\)'
    ):
        register_model(nn.Linear)


def test_a_configuration_without_a_name_is_refused():
    @dataclass
    class Nameless:
        width: int = 1

    with pytest.raises(
        ValueError, match=r"not a dataclass with a field name; write name: str = \"x\""
    ):
        register_model("x", config=Nameless)


def test_an_unknown_name_is_reported_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean llama"):
        MODELS.get("lama")


def offer(folder, name, target, source):
    """Create an installed package that announces a model."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[axonlaunch.models]\n{name} = {target}\n")
    (folder / f"{target.partition(':')[0]}.py").write_text(textwrap.dedent(source))


def test_entry_point_is_listed_without_import(tmp_path, monkeypatch):
    offer(
        tmp_path,
        "offered",
        "offered_models:Offered",
        """
        from torch import nn
        from axonlaunch.models import register_model

        @register_model("offered", inputs="images")
        class Offered(nn.Linear):
            "An offered model."
        """,
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert MODELS.summaries()["offered"] == "from offered"
    assert "offered_models" not in sys.modules
    try:
        config = FreeModelConfig(name="offered", arguments={"in_features": 2, "out_features": 3})
        assert build_model(config).out_features == 3
        assert spec_for(config).inputs == "images"
        assert MODELS.configs()["offered"] is FreeModelConfig
        assert MODELS.summaries()["offered"] == "An offered model."
    finally:
        sys.modules.pop("offered_models", None)


def test_an_entry_point_that_registers_nothing_is_reported(tmp_path, monkeypatch):
    offer(tmp_path, "empty", "empty_models:Thing", "Thing = 1")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(EntryPointError, match=r'decorate it with @register_model\("empty"\)'):
            MODELS.get("empty")
    finally:
        sys.modules.pop("empty_models", None)


def test_an_entry_point_does_not_replace_a_model_of_ours(tmp_path, monkeypatch):
    offer(tmp_path, "gpt", "other_models:Thing", "")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="gpt is an included model"):
        assert MODELS.summaries()["gpt"] == "decoder with learned positions, like GPT-2"
    assert MODELS.get("gpt").layers == "layers"


def test_custom_model_is_built_from_target():
    config = CustomConfig(
        target="torch.nn:Linear", arguments={"in_features": 2, "out_features": 3}, layers="blocks"
    )
    assert build_model(config).weight.shape == (3, 2)
    assert spec_for(config).layers == "blocks"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch", "model.target=torch: is not of the form package.module:build"),
        (
            "no_such_package:build",
            "model.target=no_such_package:build: No module named 'no_such_package'; write "
            "package.module:name, importable from where you start",
        ),
        (
            "torch.nn:Lineer",
            "model.target=torch.nn:Lineer: module 'torch.nn' has no attribute 'Lineer'; write "
            "package.module:name, importable from where you start",
        ),
        (
            "math:pi",
            "model.target=math:pi: is float, not a class or function",
        ),
        ("builtins:dict", "model.target=builtins:dict: returned dict; return a torch.nn.Module"),
    ],
)
def test_a_target_that_builds_no_module_is_reported(target, message):
    with pytest.raises(ConfigError) as error:
        build_model(CustomConfig(target=target))
    assert str(error.value) == message


def test_listing_models_imports_no_torch():
    script = (
        "import sys, axonlaunch.models; axonlaunch.models.MODELS.summaries();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
