"""Composition: groups, a user's folders, sweeps, and the source of each value."""

import sys
from pathlib import Path

import pytest

from axonlaunch import config
from axonlaunch.config import Composer, ConfigError
from axonlaunch.config.composition.compose import packaged_configs
from axonlaunch.config.composition.hydra_files import HydraFiles
from axonlaunch.config.schema import GROUPS

NEEDS = {
    "text": ["data.files=[x.txt]"],
    "documents": ["data.files=[x.jsonl]"],
    "chat": ["data.files=[x.jsonl]"],
    "tokens": ["data.path=x.bin"],
    "llama3_8b": ["data.path=x.bin"],
}
MISSING = {"data.files": "[x.jsonl]", "data.path": "x.bin"}
"""Values of keys that an experiment leaves to the user; other ones are import paths."""
OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(packaged_configs().glob("*/*.yaml"))
    if path.stem != "diffusion"  # needs a plugin of the user; test_recipes has one
]


def missing(experiment: str) -> list[str]:
    """Return the keys that an experiment leaves to the user."""
    try:
        config.load([f"experiment={experiment}"])
    except ConfigError as error:
        return [each.key for each in error.problems if each.message.startswith("is missing")]
    return []


@pytest.mark.slow(keep=30)
@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=["=".join(o) for o in OPTIONS])
def test_every_shipped_yaml_composes_and_has_a_summary(group: str, option: str) -> None:
    needed = [f"{group}.target=package.module:build"] if option == "custom" else []
    needed += ["model.path=folder"] if option == "hf" else []
    needed += NEEDS.get(option, []) if group in ("data", "model", "experiment") else []
    needed = [] if group == "model" and option == "llama3_8b" else needed
    if group == "experiment":
        needed = [f"{key}={MISSING.get(key, 'package.module:build')}" for key in missing(option)]
    if (group, option) == ("tokenizer", "train"):
        needed = ["data=documents", *NEEDS["documents"]]
    config.load([f"{group}={option}", *needed])
    assert Composer().options(group)[option], "the first line of each YAML says what it is"


def test_summary_of_a_shipped_yaml_is_not_cut() -> None:
    """``axonlaunch ls`` shows the first line, so a sentence must not go on in the next."""
    for file in packaged_configs().rglob("*.yaml"):
        lines = [line for line in file.read_text().splitlines() if "@package" not in line]
        assert not " ".join(lines[1:2]).startswith("# "), file


def test_every_group_of_the_schema_has_a_folder() -> None:
    assert {path.name for path in packaged_configs().iterdir() if path.is_dir()} == set(GROUPS)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_group_is_chosen_with_and_without_a_plus(prefix: str) -> None:
    assert config.load([f"{prefix}strategy=fsdp"]).strategy.data_parallel == "fsdp"


def test_without_a_strategy_the_number_of_devices_decides() -> None:
    assert config.load([]).strategy.data_parallel is None


def test_an_experiment_chooses_groups_and_the_command_line_has_the_last_word() -> None:
    chosen = config.load(["experiment=digits_mlp", "train.steps=7"])
    assert (chosen.model.name, chosen.data.name, chosen.train.steps) == ("mlp", "digits", 7)
    assert config.load(["experiment=digits_mlp", "model=vit"]).model.name == "vit"


def test_a_users_folder_comes_before_ours(tmp_path: Path) -> None:
    for group, option, content in (
        ("strategy", "ddp", "data_parallel: ddp\nddp:\n  bucket_size_mb: 1\n"),
        ("experiment", "mine", "# @package _global_\ntrain:\n  steps: 3\n"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{option}.yaml").write_text(content)
    chosen = config.load(["strategy=ddp", "experiment=mine"], config_dirs=[tmp_path])
    assert chosen.strategy.ddp.bucket_size_mb == 1.0
    assert chosen.train.steps == 3


def test_a_users_primary_config_needs_to_name_no_group(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train:\n  steps: 5\n")
    chosen = config.load(["strategy=zero2"], config_name="mine", config_dirs=[tmp_path])
    assert chosen.train.steps == 5
    assert chosen.strategy.fsdp.sharding == "shard_grad_op"
    assert config.load([], config_name="mine", config_dirs=[tmp_path]).model.name == "gpt"


def test_origins_name_the_file_or_the_override(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    mine = tmp_path / "optimizer" / "mine.yaml"
    mine.write_text("name: adamw\neps: 1e-6\n")
    overrides = ["strategy=hsdp", "optimizer=mine", "train.steps=3"]
    origins = Composer(config_dirs=[tmp_path]).compose(overrides).origins()
    assert origins["strategy.fsdp.sharding"] == "strategy/hsdp.yaml"
    assert origins["train.global_batch_size"] == "config.yaml"
    assert origins["train.steps"] == "override train.steps=3"
    assert origins["optimizer.eps"] == str(mine)
    assert "train.compile" not in origins


def test_interpolations_are_resolved() -> None:
    assert config.load(["train.steps=40", "checkpoint.every=${train.steps}"]).checkpoint.every == 40


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=größe", "name", "größe"),
        ("run_dir=/data/my Läufe/日本", "run_dir", "/data/my Läufe/日本"),
        ("plugins=[a, größe]", "plugins", ["a", "größe"]),
        ("model.arguments={a: é.txt, b: c}", "model.arguments.a", "é.txt"),
        ("name='é,a'", "name", "é,a"),
    ],
)
def test_letters_of_any_language_need_no_quotes(override: str, key: str, value: object) -> None:
    composed = Composer().compose([override])
    assert not composed.problems
    assert config.flatten(composed.tree)[key] == value


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run_dir=~/r", "run_dir", "/home/me/r"),
        ("launch.token_file=~/a b", "launch.token_file", "/home/me/a b"),
        ("plugins=[~/a,~/b]", "plugins", ["/home/me/a", "/home/me/b"]),
        ("model.arguments={path: ~/a}", "model.arguments.path", "/home/me/a"),
        ('name="~/r"', "name", "~/r"),
    ],
)
def test_the_home_folder_is_written_as_in_a_shell(
    override: str, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    composed = Composer().compose([override])
    assert config.flatten(composed.tree)[key] == value


def test_a_sweep_is_every_combination_in_order() -> None:
    runs = Composer().sweep(["optimizer.lr=1,2", "strategy=ddp,fsdp", "seed=3"])
    assert runs == [
        ["optimizer.lr=1", "strategy=ddp", "seed=3"],
        ["optimizer.lr=1", "strategy=fsdp", "seed=3"],
        ["optimizer.lr=2", "strategy=ddp", "seed=3"],
        ["optimizer.lr=2", "strategy=fsdp", "seed=3"],
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=range(1,100000000)"], "-m: 99,999,999 runs are too many for one sweep"),
        (["seed=range(0,100)", "train.steps=range(1,101)"], "-m: 10,000 runs are too many"),
        (["train.steps=range(5,1)"], "train.steps=range(5,1): gives no value to run with"),
        (["train.steps=range(1,5,0)"], "gives no value to run with; write train.steps=1,2"),
        (["optimizer.lr=interval(0,1)"], "gives no value to run with; write optimizer.lr=1,2"),
    ],
)
def test_a_sweep_of_no_run_or_of_too_many_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Composer().sweep(overrides)
    [issue] = raised.value.problems
    assert message in str(issue)


def test_a_sweep_over_a_group_takes_globs() -> None:
    runs = Composer().sweep(["strategy=glob(zero*)"])
    assert runs == [["strategy=zero1"], ["strategy=zero2"]]


def test_a_frozen_configuration_reads_back_equal(tmp_path: Path) -> None:
    written = config.load(["strategy=hsdp", "launch.nproc=4", "hardware=h100_80gb", "model=vit"])
    (tmp_path / "config.yaml").write_text(config.to_yaml(written))
    assert config.read_frozen(tmp_path) == written


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        config.read_frozen(tmp_path)


def test_bare_run_name_gets_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"did you mean runs/mine\?$"):
        config.read_frozen("mine")


def test_plugin_registers_model_with_custom_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin_of_a_test.py").write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from axonlaunch import register_model\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class TwoLayersConfig:\n"
        "    name: str = 'two_layers'\n"
        "    width: int = 8\n"
        "@register_model('two_layers', config=TwoLayersConfig, inputs='any')\n"
        "def build(config):\n"
        "    return nn.Sequential(nn.Linear(4, config.width), nn.Linear(config.width, 2))\n"
    )
    plugin = ["plugins=[plugin_of_a_test]", "model=two_layers"]
    assert vars(config.load([*plugin, "model.width=16"]).model) == {
        "name": "two_layers",
        "width": 16,
    }
    with pytest.raises(ConfigError, match=r"did you mean model\.width"):
        config.load([*plugin, "model.widht=16"])


@pytest.mark.parametrize("by", ["override", "file"])
def test_a_configuration_with_a_plugin_that_registers_its_option_is_composed_once(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"composed_once_{by}.py").write_text(
        f"import torch, axonlaunch as ax\nax.register_optimizer('once_{by}')(torch.optim.SGD)\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - config\n  - override optimizer: once_file\n  - _self_\n"
        "plugins: [composed_once_file]\n"
    )
    overrides = ["plugins=[composed_once_override]", "optimizer=once_override"]
    composed: list[object] = []
    compose = HydraFiles.compose
    monkeypatch.setattr(
        HydraFiles, "compose", lambda *args: composed.append(args) or compose(*args)
    )
    if by == "file":
        done = config.compose(config_name="mine", config_dirs=[tmp_path])
    else:
        done = config.compose(overrides)
    assert done.problems == []
    assert done.tree["optimizer"]["name"] == f"once_{by}"
    assert len(composed) == 1


def test_several_options_of_a_group_are_refused_where_plugins_may_register_one() -> None:
    [issue] = config.compose(["optimizer=[adamw,sgd]"]).problems
    assert "it takes one option" in str(issue)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a user's folder: a module that registers an optimizer, and experiments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "optimizer_of_a_test", raising=False)
    (tmp_path / "optimizer_of_a_test.py").write_text(
        "import torch, axonlaunch as ax\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class GradualConfig:\n"
        "    name: str = 'gradual'\n"
        "    lr: float = 0.25\n"
        "ax.register_optimizer('gradual', config=GradualConfig)(torch.optim.SGD)\n"
    )
    (tmp_path / "experiment").mkdir()
    for name, content in {
        "faster": "optimizer:\n  lr: 0.5\n",
        "chosen": "defaults:\n  - override /optimizer: gradual\nplugins: [optimizer_of_a_test]\n",
        "mistyped": "defaults:\n  - override /optimizer: gradul\nplugins: [optimizer_of_a_test]\n",
    }.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{content}")
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        (["optimizer=sgd"], 0.1),
        (["plugins=[optimizer_of_a_test]", "optimizer=gradual"], 0.25),
        (["experiment=chosen"], 0.25),
        (["plugins=[optimizer_of_a_test]", "optimizer=gradual", "experiment=faster"], 0.5),
        (["experiment=chosen", "optimizer.lr=0.75"], 0.75),
    ],
)
def test_option_default_holds_until_file_or_override(
    overrides: list[str], rate: float, users: Path
) -> None:
    """For included and registered options, chosen in any file or override."""
    composed = config.compose(overrides, config_dirs=[users])
    chosen = config.type_config(composed.tree, composed.problems)
    assert chosen.optimizer.lr == rate
    source = composed.origins().get("optimizer.lr", "default")
    sources = {0.5: str(users / "experiment" / "faster.yaml")}
    assert source == sources.get(rate, "override optimizer.lr=0.75" if rate == 0.75 else "default")


def test_unregistered_option_is_refused_from_override_and_file(
    users: Path,
) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(["experiment=mistyped"], config_dirs=[users])
    [issue] = error.value.problems
    assert issue.key == "optimizer"
    assert "there is no such option; did you mean gradual? known: adafactor, " in issue.message


@pytest.mark.parametrize(
    ("optional", "chosen"),
    [
        ("optional optimizer: gradual", "gradual"),
        ("optional optimizer: gradul", "adamw"),
        ("optional optimizer: sgd", "sgd"),
        ("optional strategy: fsdq", "adamw"),
    ],
)
def test_optional_option_that_does_not_exist_is_ignored(
    optional: str, chosen: str, users: Path
) -> None:
    (users / "mine.yaml").write_text(
        f"defaults:\n  - {optional}\n  - _self_\n"
        "plugins: [optimizer_of_a_test]\noptimizer:\n  lr: 0.5\n"
    )
    composed = config.compose(config_name="mine", config_dirs=[users])
    typed = config.type_config(composed.tree, composed.problems)
    assert (typed.optimizer.name, typed.optimizer.lr) == (chosen, 0.5)
    assert composed.origins()["optimizer.lr"] == str(users / "mine.yaml")


def test_unknown_option_is_reported_despite_an_optional_one(users: Path) -> None:
    (users / "mine.yaml").write_text(
        "defaults:\n  - optimizer: gradul\n  - optional data: tekst\n  - _self_\n"
        "plugins: [optimizer_of_a_test]\n"
    )
    [issue] = config.compose(config_name="mine", config_dirs=[users]).problems
    assert (issue.key, issue.value) == ("optimizer", "gradul")
    assert "did you mean gradual?" in issue.message


def test_configurations_are_independent() -> None:
    first = config.compose(["train.steps=3", "optimizer.groups={'*.bias':{lr:1}}"]).tree
    assert first["train"]["steps"] == 3
    again = config.compose().tree
    assert again["train"].get("steps") is None
    assert not again["optimizer"].get("groups")


def test_settings_of_hydra_in_a_users_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /hydra/job_logging: none\n"
        "hydra:\n  run:\n    dir: out\n"
        "train:\n  steps: 7\n"
    )
    tree = config.compose(["experiment=theirs"], config_dirs=[tmp_path]).tree
    assert tree["train"]["steps"] == 7
    assert "hydra" not in tree
