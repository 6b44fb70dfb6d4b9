from pathlib import Path

import pytest

from axonlaunch import config, data
from axonlaunch.config.options.data import DATASETS
from axonlaunch.config.options.model import MODELS
from axonlaunch.models.build import build_model, construct

CONFIGS = Path(__file__).parents[2] / "configs"
REQUIRED = {
    "model/custom": ["model.target=torch.nn:Linear"],
    "data/custom": ["data.target=mine:Data"],
    "model/hf": ["model.path=folder"],
    "data/text": ["data.files=[notes.txt]"],
    "data/documents": ["data.files=[notes.jsonl]"],
    "data/chat": ["data.files=[notes.jsonl]"],
    "data/tokens": ["data.path=tokens.bin"],
}


def options(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_documented_models_and_datasets_exist():
    assert set(options("model")) == {
        *("mlp", "gpt", "vit", "hf", "custom"),
        *("llama_debug", "llama3_8b", "llama3_70b", "llama3_405b"),
        *("moe_debug", "moe_30b_a3b", "deepseek_v3_16b"),
    }
    assert set(options("data")) == {*DATASETS.configs(), "auto"}


@pytest.mark.parametrize("option", [f"{g}/{o}" for g in ("model", "data") for o in options(g)])
def test_each_preset_yaml_has_description_and_composes(option):
    group, _, name = option.partition("/")
    first = (CONFIGS / f"{option}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(first) < 90
    composed = config.load([f"{group}={name}", *REQUIRED.get(option, [])])
    chosen = getattr(composed, group)
    assert type(chosen) is {"model": MODELS, "data": DATASETS}[group].config(chosen.name)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlp", 203_530),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("moe_30b_a3b", 30_532_122_624),
        ("deepseek_v3_16b", 15_706_484_224),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, parameters):
    model = construct(config.load([f"model={name}"]).model, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("data_name", ["synthetic_images", "digits"])
@pytest.mark.parametrize("model_name", ["mlp", "vit"])
def test_image_model_and_dataset_defaults_match(model_name, data_name):
    if data_name == "digits":
        pytest.importorskip("sklearn")
    chosen = config.load([f"model={model_name}", f"data={data_name}"])
    inputs = data.build_dataset(chosen.data).samples([0, 1], split="train").inputs
    assert build_model(chosen.model)(inputs).shape == (2, 10)


LARGE = ["llama3_8b", "llama3_70b", "llama3_405b"]


@pytest.mark.parametrize("name", LARGE)
def test_large_model_preset_has_suitable_settings(name):
    chosen = config.load([f"model={name}"])
    assert chosen.data.name == "synthetic_tokens"
    assert chosen.data.sequence_length == 8192 <= chosen.model.max_position_embeddings
    assert chosen.train.precision == "bf16"
    assert chosen.train.activation_checkpointing in ("selective", "full")


def test_a_small_model_stays_small():
    chosen = config.load(["model=llama_debug"])
    assert (chosen.data.name, chosen.data.sequence_length) == ("python_source", 128)
    assert (chosen.train.precision, chosen.train.global_batch_size) == ("fp32", 16)


@pytest.mark.parametrize(
    ("override", "section", "key"),
    [
        ("data.sequence_length=512", "data", "sequence_length"),
        ("train.precision=fp32", "train", "precision"),
        ("train.activation_checkpointing=none", "train", "activation_checkpointing"),
        ("train.global_batch_size=8", "train", "global_batch_size"),
    ],
)
def test_a_preset_loses_against_the_command_line(override, section, key):
    chosen = config.load(["model=llama3_8b", override])
    assert str(getattr(getattr(chosen, section), key)) == override.partition("=")[2]


@pytest.mark.parametrize("chosen_first", [True, False])
def test_a_preset_loses_against_data_that_is_chosen(chosen_first):
    overrides = ["data=digits", "model=llama3_8b"]
    assert config.load(overrides if chosen_first else overrides[::-1]).data.name == "digits"
    data_config = config.load(["model=llama3_8b", "data=text", "data.files=[x]"]).data
    assert (data_config.name, data_config.sequence_length) == ("text", 8192)


def test_a_preset_loses_against_an_experiment_and_a_users_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntrain:\n  precision: fp32\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text("name: synthetic_tokens\nsequence_length: 64\n")
    overrides = ["model=llama3_8b", "experiment=mine", "data=own"]
    chosen = config.load(overrides, config_dirs=[tmp_path])
    assert (chosen.train.precision, chosen.data.sequence_length) == ("fp32", 64)


def test_custom_model_has_preset(tmp_path):
    (tmp_path / "model").mkdir()
    mine = tmp_path / "model" / "mine.yaml"
    mine.write_text("name: gpt\npreset:\n  precision: bf16\n")
    composed = config.compose(["model=mine"], config_dirs=[tmp_path])
    assert composed.tree["train"]["precision"] == "bf16"
    assert composed.origins()["train.precision"] == str(mine)
    mine.write_text("name: gpt\npreset:\n  precison: bf16\n")
    with pytest.raises(config.ConfigError, match=r"precison=bf16: .*did you mean prec"):
        config.load(["model=mine"], config_dirs=[tmp_path])


def test_explain_names_the_preset():
    origins = config.compose(["model=llama3_8b", "train.precision=fp32"]).origins()
    assert origins["data.name"] == origins["data.sequence_length"] == "model/llama3_8b.yaml"
    assert origins["train.activation_checkpointing"] == "model/llama3_8b.yaml"
    assert origins["train.precision"] == "override train.precision=fp32"
    assert config.compose([]).origins()["train.precision"] == "config.yaml"
