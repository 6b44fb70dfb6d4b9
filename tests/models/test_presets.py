from pathlib import Path

import pytest

from axonlaunch import config, data
from axonlaunch.config.data import DATA_CONFIGS
from axonlaunch.config.model import MODEL_CONFIGS
from axonlaunch.models.build import build, construct

CONFIGS = Path(__file__).parents[2] / "configs"
REQUIRED = {
    "model/custom": ["model.target=torch.nn:Linear"],
    "data/text": ["data.files=[notes.txt]"],
    "data/tokens": ["data.path=tokens.bin"],
}


def options(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_the_promised_models_and_datasets_are_there():
    assert set(options("model")) == {
        *("mlp", "gpt", "vit", "custom"),
        *("llama_debug", "llama3_8b", "llama3_70b", "llama3_405b"),
    }
    assert set(options("data")) == set(DATA_CONFIGS)


@pytest.mark.parametrize("option", [f"{g}/{o}" for g in ("model", "data") for o in options(g)])
def test_each_yaml_says_what_it_is_and_composes(option):
    group, _, name = option.partition("/")
    first = (CONFIGS / f"{option}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(first) < 90
    composed = config.load([f"{group}={name}", *REQUIRED.get(option, [])])
    chosen = getattr(composed, group)
    assert type(chosen) is {**MODEL_CONFIGS, **DATA_CONFIGS}[chosen.name]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlp", 203_530),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, parameters):
    model = construct(config.load([f"model={name}"]).model, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("data_name", ["synthetic_images", "digits"])
@pytest.mark.parametrize("model_name", ["mlp", "vit"])
def test_models_of_images_take_the_images_as_both_come(model_name, data_name):
    if data_name == "digits":
        pytest.importorskip("sklearn")
    chosen = config.load([f"model={model_name}", f"data={data_name}"])
    inputs = data.build(chosen.data).samples([0, 1], split="train").inputs
    assert build(chosen.model)(inputs).shape == (2, 10)
