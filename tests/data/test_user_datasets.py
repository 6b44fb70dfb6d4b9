"""torch datasets with samples of any structure, and losses that see the whole batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import estimate_config, run_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import axonlaunch as ax
from axonlaunch import data, models
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.events import Monitor, StepLogged
from axonlaunch.planning.memory import estimate as memory_estimate
from axonlaunch.training import worker
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

MODULE = '''
import torch
from torch import nn

import axonlaunch as ax


def samples(count):
    """Words of unequal length, a weight each, and numbers nested in a tuple."""
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        words = torch.randint(1, 32, (2 + index % 5,), generator=generator)
        extra = torch.randn(3, generator=generator)
        sample = {"words": words, "pair": (extra, [extra * 2]), "label": index % 4}
        yield {**sample, "weight": 1.0 + index % 3}


def padded(items):
    words = nn.utils.rnn.pad_sequence([item["words"] for item in items], batch_first=True)
    pairs = [item["pair"] for item in items]
    return {
        "words": words,
        "pair": (torch.stack([a for a, _ in pairs]), [torch.stack([b for _, [b] in pairs])]),
        "label": torch.tensor([item["label"] for item in items]),
        "weight": torch.tensor([item["weight"] for item in items]),
        "names": [str(item["label"]) for item in items],
    }


class ByIndex(torch.utils.data.Dataset):
    def __init__(self, count=64):
        self.samples = list(samples(count))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Stream(torch.utils.data.IterableDataset):
    """Has a state; each pass is in another order."""

    def __init__(self, count=24):
        self.samples, self.held_out = list(samples(count)), list(samples(8))
        self.at = self.epoch = 0

    def __len__(self):
        return len(self.samples)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for at in range(self.at, len(self.samples)):
            self.at = at + 1
            yield self.samples[(at * 5 + self.epoch) % len(self.samples)]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Endless:
    """Neither a length nor a state."""

    def __iter__(self):
        while True:
            yield from samples(20)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.extra = nn.Linear(3, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, words, pair):
        first, [second] = pair
        x = self.embedding(words).sum(1) + self.extra(first + second)
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"scores": self.head(x), "size": x.square().mean(-1)}


def weighted(outputs, batch, strength=0.1):
    """Weighted cross entropy and a penalty."""
    losses = torch.nn.functional.cross_entropy(outputs["scores"], batch["label"], reduction="none")
    assert len(batch["names"]) == len(losses)
    return (losses * batch["weight"] + strength * outputs["size"]).sum()


ax.register_loss("weighted_of_a_test")(weighted)
ax.register_loss("by_weight_of_a_test", count=lambda batch: batch["weight"].sum().long())(weighted)
ax.register_loss(
    "by_length_of_a_test", count=lambda batch: batch["words"].numel(), counted="tokens"
)(weighted)
ax.register_loss("by_image_of_a_test", counted="images")(weighted)
'''
CHOSEN = ["plugins=[own_of_a_test]", "model=custom", "model.target=own_of_a_test:Model"]
CHOSEN += ["model.layers=blocks", "data=custom", "data.collate=own_of_a_test:padded"]
CHOSEN += ["train.loss=weighted_of_a_test", "train.global_batch_size=8", "train.steps=5"]
CHOSEN += ["train.micro_batch_size=2", "optimizer=sgd", "optimizer.lr=0.1", "train.eval_batches=1"]
LINEAR = ["model.target=torch.nn:Linear", "model.layers=null"]
LINEAR += ["model.arguments={in_features: 2, out_features: 2}"]
INDEXED, STREAM = "data.target=own_of_a_test:ByIndex", "data.target=own_of_a_test:Stream"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a module in the working folder."""
    (tmp_path / "own_of_a_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    from axonlaunch.config.options.losses import LOSSES

    sys.modules.pop("own_of_a_test", None)
    for name in [name for name in LOSSES.names() if name.endswith("_of_a_test")]:
        del LOSSES._entries[name]


def trained(config: RunConfig, *, first: int = 0, state: Any = None) -> list[float]:
    """Return the losses of all ranks' steps."""

    def on_rank(world: World) -> list[float]:
        layout = Layout.of(config, world_size=world.world_size)
        dataset = data.build_dataset(config.data)
        loader = rank_loader(config, dataset, layout=layout, rank=world.rank)
        engine = build_engine(config, world)
        losses = [
            float(engine.train_step(loader.batch(step)).loss)
            for step in range(config.train.num_steps)
        ]
        sums = sum(engine.evaluate(batch) for batch in loader.eval_batches(1))
        return [*losses, *[float(total) for total in sums]]

    by_rank = World.mock(num_ranks(config)).run(on_rank)
    *losses, _, _ = by_rank[0]
    assert all(rank[:-2] == losses for rank in by_rank)
    totals = [sum(rank[column] for rank in by_rank) for column in (-2, -1)]
    return [*losses, *totals]


def plain_loop(config: RunConfig) -> list[float]:
    """Return the losses of a loop in plain torch."""
    user_module: Any = sys.modules["own_of_a_test"]
    model = models.build.build_model(config.model, seed=config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=config.optimizer.momentum)
    dataset = data.build_dataset(config.data)
    loader = rank_loader(config, dataset, layout=Layout.of(config, world_size=1), rank=0)
    losses = []
    for step in range(config.train.num_steps):
        from axonlaunch.engines.optimizer.schedules import learning_rate

        batch = user_module.padded(loader.batch(step).items)
        loss = user_module.weighted(model(batch["words"], batch["pair"]), batch) / 8
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                config.scheduler, step, peak=0.1, steps=config.train.num_steps
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("target", [INDEXED, STREAM])
def test_nested_batches_train_as_in_a_plain_loop_under_every_data_layout(target: str) -> None:
    single = run_config([*CHOSEN, target, "strategy=single", "launch.nproc=1"])
    expected = plain_loop(single)
    of_one = trained(single)
    assert of_one[:-2] == pytest.approx(expected, abs=1e-5)
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        config = run_config([*CHOSEN, target, f"strategy={strategy}", "launch.nproc=2"])
        assert trained(config) == pytest.approx(of_one, abs=1e-5), strategy


def test_loss_sum_is_divided_by_counted_targets() -> None:
    chosen = [*CHOSEN, INDEXED, "train.loss=by_weight_of_a_test", "train.steps=1"]
    config = run_config([*chosen, "strategy=fsdp", "launch.nproc=2"])
    user_module: Any = sys.modules["own_of_a_test"]
    batch = user_module.padded(whole_batch(config))
    model = models.build.build_model(config.model, seed=config.seed)
    total = float(user_module.weighted(model(batch["words"], batch["pair"]), batch).detach())
    assert trained(config)[0] == pytest.approx(total / int(batch["weight"].sum()), abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "unit"),
    [
        ("weighted_of_a_test", "samples"),
        ("by_weight_of_a_test", "targets"),
        ("by_length_of_a_test", "tokens"),
        ("by_image_of_a_test", "images"),
    ],
)
def test_metrics_are_named_after_the_unit_of_the_loss(loss: str, unit: str) -> None:
    chosen = [*CHOSEN, INDEXED, f"train.loss={loss}", "train.steps=1", "launch.nproc=1"]
    config = run_config([*chosen, "run_dir=run"])
    Path("run").mkdir()
    World.mock(1).run(lambda world: worker.run(config, world))
    first = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    assert {f"{unit}", f"{unit}_per_s", f"{unit}_seen"} <= first.keys()
    assert not any("tokens" in name for name in first if unit != "tokens")


def test_a_loss_that_counts_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="counted='frames': use one of tokens, images, samples"):
        ax.register_loss("frames_of_a_test", counted="frames")  # type: ignore[arg-type]


def whole_batch(config: RunConfig) -> list[Any]:
    dataset = data.build_dataset(config.data)
    return (
        rank_loader(config, dataset, layout=Layout.of(config, world_size=1), rank=0).batch(0).items
    )


def test_an_option_of_a_loss_reaches_it_and_an_unknown_loss_is_refused() -> None:
    chosen = [*CHOSEN, INDEXED, "strategy=single", "launch.nproc=1", "train.steps=1"]
    strong = run_config([*chosen, "train.loss_options.arguments={strength: 5}"])
    assert trained(strong)[0] > trained(run_config(chosen))[0] + 0.1
    with pytest.raises(ConfigError, match="did you mean weighted_of_a_test"):
        run_config([*chosen, "train.loss=weigted_of_a_test"])


def test_each_held_out_sample_is_counted_once_by_any_number_of_ranks() -> None:
    for ranks in (1, 2, 4):
        config = run_config([*CHOSEN, INDEXED, "strategy=ddp", f"launch.nproc={ranks}"])
        *_, count = trained(config)
        assert count == 3  # 5 % of 64


# Streams


def test_a_stream_continues_where_its_state_says_also_in_a_later_pass() -> None:
    config = run_config([*CHOSEN, STREAM, "strategy=ddp", "launch.nproc=2"])
    layout = Layout.of(config, world_size=2)

    def loader(rank: int) -> Any:
        return rank_loader(config, data.build_dataset(config.data), layout=layout, rank=rank)

    full = loader(0)
    expected = [full.batch(step).items for step in range(9)]
    for resumed_at in (1, 3, 5, 8):
        for rank in (0, 1):
            first = loader(rank)
            for step in range(resumed_at):
                first.batch(step)
            again = loader(rank)
            again.resume(first.state(resumed_at))
            if not rank:
                for step in range(resumed_at, 9):
                    assert str(again.batch(step).items) == str(expected[step])
    past = loader(0)  # a checkpoint without a state: samples are read again
    assert str(past.batch(7).items) == str(expected[7])


@pytest.mark.slow
def test_a_resumed_run_reads_the_next_sample_of_the_stream_on_another_layout() -> None:
    chosen = [*CHOSEN, STREAM, "train.log_every=1", "checkpoint.every=2", "scheduler=constant"]

    def losses(*overrides: str) -> list[float]:
        config = run_config([*chosen, *overrides])
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        events: list[Any] = []
        World.mock(num_ranks(config)).run(
            lambda world: worker.run(config, world, monitor=Monitor(report=events.append))
        )
        return [event.loss for event in events if isinstance(event, StepLogged)]

    full = losses("run_dir=runs/whole", "train.steps=5", "strategy=fsdp", "launch.nproc=2")
    first = losses("run_dir=runs/halves", "train.steps=4", "strategy=ddp", "launch.nproc=4")
    rest = losses("run_dir=runs/halves", "train.steps=5", "strategy=fsdp", "launch.nproc=2")
    assert [*first, *rest] == pytest.approx(full, abs=1e-5)
    manifest = Path("runs/halves/checkpoints/step_4/manifest.json").read_text()
    assert '"samples": 32' in manifest
    assert '"dataset": "{\\"at\\": 8}"' in manifest


def test_the_ranks_of_a_stream_share_each_global_batch() -> None:
    single = run_config([*CHOSEN, STREAM, "strategy=single", "launch.nproc=1"])
    two = run_config([*CHOSEN, STREAM, "strategy=ddp", "launch.nproc=2"])
    full = whole_batch(single)
    layout = Layout.of(two, world_size=2)
    shards = [
        rank_loader(two, data.build_dataset(two.data), layout=layout, rank=rank).batch(0).items
        for rank in range(2)
    ]
    assert str([*shards[0], *shards[1]]) == str(full)


def test_a_stream_without_a_length_trains_by_steps_and_not_by_epochs() -> None:
    chosen = [*CHOSEN, "data.target=own_of_a_test:Endless", "strategy=ddp", "launch.nproc=2"]
    config = run_config([*chosen, "train.eval_batches=0"])
    assert (
        data.build_dataset(config.data)
        .info.notes[0]
        .startswith("data: a stream without state_dict")
    )
    with pytest.raises(ConfigError, match=r"train\.epochs=2.*no __len__.*use train\.steps"):
        run_config([*chosen, "train.eval_batches=0", "train.steps=auto", "train.epochs=2"])
    with pytest.raises(
        ConfigError, match=r"train\.eval_batches=1: .*give it an attribute held_out"
    ):
        run_config(chosen)


# Errors before a rank starts


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.loss=null"], r"train\.loss=null: .*use a loss registered .*, or return pairs of"),
        (
            ["strategy=tensor", "launch.nproc=2"],
            r"strategy\.tensor\.degree=2: data=custom returns structured batches, but this splits "
            "layers",
        ),
        (
            ["strategy=pipeline", "launch.nproc=2"],
            r"strategy\.pipeline\.degree=2: .*splits blocks",
        ),
        (["train.loss_chunk=4"], r"train\.loss_chunk=4: .*use null"),
        (
            LINEAR,
            r"model=custom: its forward takes input, but the batches of data=custom have words, "
            "pair, label, weight, names",
        ),
        (
            ["data.collate=null"],
            "collating its samples failed with RuntimeError: .*give it a collate function",
        ),
        (["data.collate=own_of_a_test:nothing"], r"data\.collate=own_of_a_test:nothing: "),
        (["data.target=builtins:set"], "the dataset is empty"),
    ],
)
def test_mismatched_user_dataset_is_refused_with_reason(overrides: list[str], message: str) -> None:
    alone = ["strategy=single", "launch.nproc=1"]
    more = [] if any("nproc" in word for word in overrides) else alone
    with pytest.raises(ConfigError, match=message):
        run_config([*CHOSEN, INDEXED, "train.micro_batch_size=4", *more, *overrides])


# A custom loss on tokens


@pytest.mark.slow
def test_custom_loss_gets_token_inputs_and_targets() -> None:
    import axonlaunch as ax

    @dataclass(frozen=True, kw_only=True)
    class Smoothing:
        name: str = "smooth_of_a_test"
        by: float = 0.2

    @ax.register_loss("smooth_of_a_test", config=Smoothing)
    def smooth(outputs: Tensor, batch: dict[str, Tensor], options: Smoothing) -> Tensor:
        assert batch["inputs"].shape == batch["targets"].shape
        logits, targets = outputs.flatten(0, 1), batch["targets"].flatten()
        return cross_entropy(logits, targets, label_smoothing=options.by, reduction="sum")

    overrides = ["model=gpt", "model.hidden_size=16", "model.num_hidden_layers=1", "launch.nproc=2"]
    overrides += ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"]
    overrides += ["train.loss=smooth_of_a_test", "train.loss_options.by=0.3", "strategy=fsdp"]
    config = run_config(overrides)
    assert on_mock(config, ComparisonPlan(steps=2, beyond=True)).passed
    with pytest.raises(ConfigError, match=r"needs the full batch and the full outputs"):
        run_config([*overrides, "strategy=tensor"])


# verify and estimate


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("target", [INDEXED, STREAM])
def test_verify_compares_nested_batches_with_one_process(target: str) -> None:
    config = run_config([*CHOSEN, target, "strategy=fsdp", "launch.nproc=2"])
    verdict = on_mock(config, ComparisonPlan(steps=3, beyond=True))
    assert verdict.passed, verdict.failure


@pytest.mark.slow
def test_an_estimate_counts_the_bytes_of_nested_batches() -> None:
    config = estimate_config([*CHOSEN, INDEXED, "strategy=ddp", "launch.nproc=2"])
    rank = memory_estimate.estimate(config).ranks[0]
    assert rank.breakdown["parameters"] == 4 * sum(
        p.numel() for p in models.build.build_model(config.model, seed=0).parameters()
    )
