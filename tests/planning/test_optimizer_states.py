"""An optimizer's states count as what they are, wherever bytes are counted before a run."""

from __future__ import annotations

import pytest

from axonlaunch import config
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import resolved
from axonlaunch.planning.memory import estimate as memory_estimate
from axonlaunch.planning.memory import states_only
from axonlaunch.preflight import checks

NO_MOMENTUM = ["optimizer=sgd", "optimizer.momentum=0"]


def chosen(*words: str) -> RunConfig:
    return resolved(config.load(words), accelerators=0)


@pytest.mark.parametrize("strategy", ["single", "zero1", "fsdp"])
def test_sgd_without_momentum_has_no_state_bytes_in_an_estimate(strategy: str) -> None:
    words = ["model.hidden_size=16", "model.num_attention_heads=2", "data=synthetic_tokens"]
    run = chosen(*words, "data.sequence_length=8", f"strategy={strategy}", *NO_MOMENTUM)
    for estimate in (memory_estimate.estimate(run), states_only.estimate_states(run)):
        assert [rank.breakdown["optimizer"] for rank in estimate.ranks] == [0] * len(estimate.ranks)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [(["optimizer=adamw"], 16), (["optimizer=sgd"], 12), (NO_MOMENTUM, 8)],
)
def test_what_can_t_fit_is_refused_by_the_bytes_of_this_optimizers_states(
    optimizer: list[str], bytes_each: int
) -> None:
    run = chosen("model=llama3_8b", "strategy=single", "hardware=a100_40gb", *optimizer)
    [problem] = [one for one in checks.check(run) if one.key == "model"]
    assert f"take {8_030_261_248 * bytes_each / 2**30:.1f} GiB per rank" in problem.message
