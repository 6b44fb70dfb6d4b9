"""The JSON schema of configuration files accepts what can be loaded, and rejects mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from axonlaunch import config
from axonlaunch.cli.configuration.config import schema_of_files
from axonlaunch.cli.configuration.init import _files
from axonlaunch.config.composition.compose import packaged_configs
from axonlaunch.config.values.plain_values import read_yaml

jsonschema = pytest.importorskip("jsonschema")
EXPERIMENTS = sorted(packaged_configs().glob("experiment/*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(json.dumps(schema_of_files()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_schema_accepts_every_included_experiment(validator: Any) -> None:
    assert len(EXPERIMENTS) > 10
    for file in EXPERIMENTS:
        assert not [*validator.iter_errors(read_yaml(file.read_text()))], file.name


@pytest.mark.parametrize("kind", ["chat", "custom", "documents", "image"])
def test_schema_accepts_the_file_of_a_new_project(validator: Any, kind: str) -> None:
    settings = dict(_files(kind))["run.yaml"]
    assert not [*validator.iter_errors(read_yaml(settings))]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=llama_debug", "adapter=lora", "strategy=hybrid", "hardware=h100_80gb"],
        ["data=text", "data.files=[a.txt]", "loggers=[tensorboard]", "launch=slurm"],
        ["optimizer=muon", "scheduler=wsd", "optimizer.groups={'*.bias': {weight_decay: 0}}"],
        ["model=hf", "model.path=a/b", "data=chat", "data.files=[a]", "checkpoint.every=[1,2]"],
    ],
)
def test_schema_accepts_frozen_configurations(validator: Any, overrides: list[str]) -> None:
    assert validator.is_valid(read_yaml(config.to_yaml(config.load(overrides))))


@pytest.mark.parametrize(
    "text",
    [
        "strategy: fsdp\nmodel:\n  name: hf\n  path: a/b\ntrain:\n  epochs: 0.5\n",
        "plugins: [a]\nmodel: mine\noptimizer:\n  name: mine\n  anything: 1\nadapter: null\n",
        "plugins: [a]\nstrategy:\n  data_parallel: mine\nloggers: [mine]\ntrain:\n  loss: mine\n",
        "defaults: [_self_, {override /model: hf}, {strategy: fsdp}]\n",
        "train:\n  steps: ${oc.env:STEPS}\n  eval_every: 0.5 epoch\n",
        "data:\n  files: train.jsonl\nloggers: [wandb, {target: 'a:B', arguments: {b: 1}}]\n",
    ],
)
def test_schema_accepts_files_of_users(validator: Any, text: str) -> None:
    assert validator.is_valid(read_yaml(text))


@pytest.mark.parametrize(
    "text",
    [
        "train:\n  stepz: 3\n",
        "train:\n  steps: many\n",
        "train:\n  micro_batch_size: 0\n",
        "modl: hf\n",
        "strategy:\n  tensor:\n    degree: two\n",
        "optimizer:\n  name: sgd\n  betas: [0.9, 0.9]\n",
        "optimizer:\n  lr: -1.0\n",
        "model: 3\n",
        "loggers: [3]\n",
        "strategy: fsdpp\n",
        "tokenizer: byte\n",
        "adapter: lorra\n",
        "hardware: h100\n",
        "experiment: llama\n",
        "model: gpt2\n",
        "model:\n  name: gptt\n",
        "optimizer: adamx\n",
        "scheduler:\n  name: cosin\n",
        "data: docs\n",
        "launch: slurmm\n",
        "loggers: [wandbb]\n",
        "metrics: [{name: acuracy}]\n",
        "train:\n  loss: cross\n",
        "strategy:\n  data_parallel: fsdpp\n",
        "strategy:\n  expert:\n    dispatch: all\n",
        "plugins: [a]\nstrategy: fsdpp\n",
        "defaults: [{override /model: hff}]\n",
        "defaults: [{override /modle: hf}]\n",
    ],
)
def test_schema_rejects_mistakes(validator: Any, text: str) -> None:
    assert not validator.is_valid(read_yaml(text))


def test_schema_describes_every_key_that_a_load_describes(validator: Any) -> None:
    train = validator.schema["properties"]["train"]["properties"]
    assert train["grad_clip"]["description"]
    assert train["grad_clip"]["default"] == 1.0
    options = validator.schema["properties"]["strategy"]["anyOf"][0]["anyOf"][0]["enum"]
    assert {"ddp", "fsdp", None} <= {*options}
