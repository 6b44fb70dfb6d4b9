"""A dataclass of options inherits the texts of keys from its base class, even if they are false.

Each inherited text is in ``READ``, and claims that code can check are checked for every option.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import Field, fields
from typing import Any

import pytest
import torch

from axonlaunch.config.optimization.optimizer import INCLUDED_OPTIMIZERS, OPTIMIZERS
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.optimization.schedules import SCHEDULERS
from axonlaunch.config.options.model import INCLUDED_MODEL_CONFIGS
from axonlaunch.config.schema import REGISTRIES
from axonlaunch.config.validation.key_reference import meanings
from axonlaunch.engines.optimizer.schedules import learning_rate
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.models.build import on_meta

READ = {
    "AdamWConfig": {"lr eps": "AdamConfig NAdamConfig", "betas": "NAdamConfig"},
    "ConstantConfig": {
        "warmup_steps warmup_ratio": "CosineConfig InverseSqrtConfig LinearConfig WSDConfig"
    },
    "CosineConfig": {"final_lr_ratio": "LinearConfig"},
    "FreeOptimizerConfig": {"lr arguments": "CustomOptimizerConfig"},
    "GroupedOptimizer": {
        "groups master_weights state_dtype": "AdafactorConfig AdamConfig AdamWConfig "
        "CustomOptimizerConfig LionConfig MuonConfig NAdamConfig SGDConfig"
    },
    "LlamaConfig": {
        "hidden_size num_key_value_heads vocab_size max_position_embeddings rope_theta "
        "rms_norm_eps initializer_range tie_word_embeddings weights": "MoEConfig"
    },
    "RegisteredConfig": {
        "arguments": "CustomCallbackConfig CustomLoggerConfig CustomMetricConfig "
        "CustomScheduleConfig"
    },
    "TextRowsConfig": {
        "cache_dir files held_out limit min_tokens mix on_bad_row sequence_length shuffle split "
        "subset too_long validation_split": "ChatConfig DocumentsConfig",
        "packing": "DocumentsConfig",
    },
    "TransformersModel": {
        "attention config name path revision router_aux_loss trust_remote_code": "HuggingFaceConfig"
    },
}
"""Texts that are true for the classes that inherit them: by base class, the fields' names."""


def test_every_inherited_text_has_been_read_for_the_class_that_inherits_it() -> None:
    """Read a new one: add it to ``READ`` if it is true, or declare the field with another text."""
    kinds = {kind for registry in REGISTRIES.values() for kind in registry.configs().values()}
    declarations = {
        (next(base for base in kind.__mro__ if spec.name in base.__annotations__), spec.name, kind)
        for kind in kinds
        for spec in fields(kind)
    }
    assert {
        (base.__name__, name, kind.__name__)
        for base, name, kind in declarations
        if base is not kind
    } == {
        (base, name, kind)
        for base, texts in READ.items()
        for names, inheriting in texts.items()
        for name in names.split()
        for kind in inheriting.split()
    }


def states_after_a_step(name: str, *, weight_decay: float) -> dict[str, torch.Tensor]:
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
    facts = ParameterFacts(name="p", shape=(2, 2), is_hidden_matrix=True)
    optimizer = OPTIMIZERS.config(name)(weight_decay=weight_decay)
    update = Update(optimizer, {"p": weight}, parameters={"p": facts})
    weight.grad = torch.tensor([[0.5, 1.0], [-1.0, 0.25]])
    update.apply(rate=lambda peak: peak)
    return update.state_dict()


@pytest.mark.parametrize("name", sorted(INCLUDED_OPTIMIZERS))
def test_the_text_of_weight_decay_says_whether_it_is_decoupled(name: str) -> None:
    """Decoupled decay does not change the optimizer's states; an L2 penalty does."""
    text = meanings(OPTIMIZERS.config(name))["weight_decay"]
    decayed = states_after_a_step(name, weight_decay=0.25)
    without = states_after_a_step(name, weight_decay=0.0)
    is_decoupled = all(torch.equal(decayed[key], without[key]) for key in decayed)
    assert ("decoupled" in text) == is_decoupled
    assert ("L2 penalty" in text) != is_decoupled


@pytest.mark.parametrize("name", sorted(SCHEDULERS.configs()))
def test_the_text_of_final_lr_ratio_is_the_rate_of_the_last_step(name: str) -> None:
    kind = SCHEDULERS.config(name)
    if "final_lr_ratio" in meanings(kind):
        assert "learning rate of the last step as a fraction of the peak" in str(meanings(kind))
        schedule = kind(final_lr_ratio=0.25)
        assert learning_rate(schedule, 59, peak=2.0, steps=60) == pytest.approx(0.5)


def kinds_with(name: str) -> list[type]:
    return [kind for kind in INCLUDED_MODEL_CONFIGS if name in meanings(kind)]


def shapes_by_block(config: Any) -> dict[str, dict[str, torch.Size]]:
    shapes: dict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, parameter in on_meta(config, seed=0).named_parameters():
        if number := re.search(r"\.(\d+)\.", name):
            shapes[number[1]][name] = parameter.shape
    return shapes


@pytest.mark.parametrize("kind", kinds_with("intermediate_size"))
def test_texts_of_models_say_which_blocks_have_a_feed_forward(kind: Any) -> None:
    narrow, wide = (
        shapes_by_block(kind(num_hidden_layers=2, intermediate_size=size)) for size in (8, 16)
    )
    has_feed_forward = {block for block in narrow if narrow[block] != wide[block]}
    is_in_all = has_feed_forward == narrow.keys() == {"0", "1"}
    texts = meanings(kind)
    assert texts["num_hidden_layers"].endswith("each with attention and feed-forward") == is_in_all
    assert texts["intermediate_size"].startswith("width of the feed-forward layers") == is_in_all


def whole_numbers(kind: type) -> list[Field[Any]]:
    return [spec for spec in fields(kind) if spec.default is None and "int" in str(spec.type)]


@pytest.mark.parametrize("kind", kinds_with("num_attention_heads"))
def test_texts_of_models_say_when_heads_must_divide_the_hidden_size(kind: Any) -> None:
    options = [{}, *({spec.name: 16} for spec in whole_numbers(kind))]
    problems = [
        kind(hidden_size=64, num_attention_heads=3, **option).problems() for option in options
    ]
    is_always = all("num_attention_heads" in dict(found) for found in problems)
    text = meanings(kind)["num_attention_heads"]
    assert text.endswith("; must divide hidden_size") == is_always
