"""Lists every layout that the tests compare with a single process, and writes the page about them.

``python tests/support/parity_table.py`` writes that page, ``tests/parity/README.md``.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from axonlaunch.config.consistency.schedule_rules import SCHEDULES as RULES

PAGE = Path(__file__).parents[1] / "parity" / "README.md"
BATCH = 16

TOKENS = ["data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=12"]
IMAGES = ["data=synthetic_images", "data.image_size=8", "data.num_channels=1"]
MODELS = {
    "mlp": ["model=mlp", "model.hidden_size=24", "model.input_size=64", *IMAGES],
    "gpt": [
        *("model=gpt", "model.hidden_size=32", "model.num_attention_heads=4"),
        *("model.vocab_size=64", "model.max_position_embeddings=16", *TOKENS),
    ],
    "llama": [
        *("model=llama_debug", "model.hidden_size=32", "model.num_attention_heads=4"),
        *("model.num_key_value_heads=4", "model.intermediate_size=48", "model.vocab_size=64"),
        *TOKENS,
    ],
    "moe": [
        *("model=moe_debug", "model.hidden_size=32", "model.num_attention_heads=4"),
        *("model.moe_intermediate_size=16", "model.intermediate_size=48", "model.vocab_size=64"),
        *("model.balance_rate=0.05", *TOKENS),
    ],
    "vit": [
        *("model=vit", "model.hidden_size=32", "model.image_size=8", "model.num_channels=1"),
        *IMAGES,
    ],
}
WITH_SEQUENCES = ("gpt", "llama")
WITH_EXPERTS = ("moe",)

TENSOR, PIPELINE = "strategy.tensor.degree=", "strategy.pipeline.degree="
CONTEXT, EXPERT = "strategy.context.degree=", "strategy.expert.degree="
SCHEDULE = "strategy.pipeline.schedule="
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
    "dualpipev": 2,
}
"""Schedules, and the number of stages that each places on a rank."""
SPLITTING = {name for name, rule in RULES.items() if rule.separate_weight_grad}
ACCUMULATION = (1, 2)
RECOMPUTED = ("none", "full", "selective")
"""Kinds of activation checkpointing."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout.

    Attributes:
        label: Title of its row on the page.
        ranks: Number of ranks.
        overrides: Overrides that select it.
        data_ranks: Number of ranks that share the batch.
        stages: Number of pipeline stages.
    """

    label: str
    ranks: int
    overrides: tuple[str, ...]
    data_ranks: int
    stages: int = 1


@dataclass(frozen=True)
class Combination:
    """A layout combined with a model, a precision, accumulation and recomputation.

    Attributes:
        accumulation: Micro-batches per step, or rounds of a pipeline's schedule.
        recomputed: Value of ``train.activation_checkpointing``.
        paired: Whether it is one of those that have every pair of values of two factors.
    """

    layout: Layout
    model: str
    precision: str
    accumulation: int
    recomputed: str
    paired: bool

    @property
    def overrides(self) -> list[str]:
        """Overrides of the run, without the model."""
        samples = BATCH // self.layout.data_ranks // self.accumulation
        chosen = [
            *self.layout.overrides,
            f"train.precision={self.precision}",
            f"train.activation_checkpointing={self.recomputed}",
        ]
        if self.layout.stages == 1:
            return [*chosen, f"train.micro_batch_size={samples}"]
        micro_batches = next(n for n in range(self.layout.stages, 99) if samples % n == 0)
        return [
            *chosen,
            f"train.micro_batch_size={samples // micro_batches}",
            f"strategy.pipeline.microbatches={micro_batches}",
        ]

    @property
    def model_overrides(self) -> list[str]:
        """Overrides of the model: three blocks (first, middle, last), or enough for the stages."""
        blocks = 3 if self.layout.stages == 1 else max(4, self.layout.stages)
        return [*MODELS[self.model], f"model.num_hidden_layers={blocks}"]

    def reference(self) -> tuple[str, ...]:
        """Return the settings that the reference depends on, by which tests are sorted."""
        settings = [key for key in self.overrides if key not in self.layout.overrides]
        blocks = self.model_overrides[-1]
        is_whole = self.precision == "fp32"  # one process computes all samples at once
        return (self.precision, self.model, blocks, *([] if is_whole else sorted(settings)))

    @property
    def steps(self) -> int:
        """Number of optimizer steps to compare: two, because the second uses the first update.

        In bf16, rounding turns single units of ReLU on or off in only some steps. The effect of
        rounding is known only after six steps, the number that ``axonlaunch verify`` makes.
        """
        return 6 if self._rounds_units else 2

    @property
    def _rounds_units(self) -> bool:
        return (self.model, self.precision) == ("mlp", "bf16")

    def __str__(self) -> str:
        labels = (self.layout.label, self.layout.ranks, self.model, self.precision)
        return "-".join(map(str, (*labels, self.accumulation, self.recomputed))).replace(" ", "_")


def layouts() -> Iterator[Layout]:
    yield Layout("single", 1, ("strategy=single",), 1)
    kinds = {
        "ddp": ("strategy=ddp",),
        "ddp, synchronous": ("strategy=ddp", "strategy.ddp.sync=synchronous"),
        "ddp, no_sync": ("strategy=ddp", "strategy.ddp.sync=no_sync"),
        "zero1": ("strategy=zero1",),
        "zero2": ("strategy=zero2",),
        "fsdp": ("strategy=fsdp",),
        "fsdp, no_shard": ("strategy=fsdp", "strategy.fsdp.sharding=no_shard"),
        "fsdp, offload params": ("strategy=fsdp", "strategy.fsdp.cpu_offload=params"),
        "fsdp, offload states": ("strategy=fsdp", "strategy.fsdp.cpu_offload=optimizer_states"),
        "fsdp, offload full": ("strategy=fsdp", "strategy.fsdp.cpu_offload=full"),
    }
    hsdp = ("strategy=hsdp", "strategy.fsdp.replicate=2")
    for label, overrides in kinds.items():
        counts = (2, 4, 8) if label in ("ddp", "fsdp") else (1, 2, 4)
        for ranks in counts:
            yield Layout(label, ranks, overrides, ranks)
    for ranks in (4, 8):
        yield Layout("hsdp", ranks, hsdp, ranks)
    for degree in (2, 4):
        tensor = ("strategy=tensor", f"{TENSOR}{degree}")
        yield Layout("tensor", degree, tensor, 1)
        sequence_parallel = (*tensor, "strategy.tensor.sequence_parallel=true")
        yield Layout("tensor, sequence", degree, sequence_parallel, 1)
    for schedule, each in SCHEDULES.items():
        for degree in (2, 4):
            chosen = ("strategy=pipeline", f"{PIPELINE}{degree}", SCHEDULE + schedule)
            yield Layout(f"pipeline, {schedule}", degree, chosen, 1, degree * each)
    for label in ("ddp", "zero1", "zero2", "fsdp", "fsdp, offload full"):
        yield Layout(f"{label} x tensor", 4, (*kinds[label], f"{TENSOR}2"), 2)
        yield Layout(f"{label} x pipeline", 4, (*kinds[label], f"{PIPELINE}2"), 2, 2)
    for label in ("ddp", "zero1", "fsdp", "fsdp, no_shard"):
        both = (*kinds[label], f"{TENSOR}2", f"{PIPELINE}2")
        yield Layout(f"{label} x tensor x pipeline", 8, both, 2, 2)
    yield Layout("hsdp x tensor", 8, (*hsdp, f"{TENSOR}2"), 4)
    yield Layout("hsdp x pipeline", 8, (*hsdp, f"{PIPELINE}2"), 4, 2)
    yield Layout("tensor x pipeline", 4, ("strategy=tensor", f"{TENSOR}2", f"{PIPELINE}2"), 1, 2)
    for label in ("ddp", "zero1", "fsdp"):
        yield Layout(f"{label} x context", 4, (*kinds[label], f"{CONTEXT}2"), 2)
    yield Layout("context", 2, (f"{CONTEXT}2",), 1)
    yield Layout("tensor x context", 4, ("strategy=tensor", f"{TENSOR}2", f"{CONTEXT}2"), 1)
    yield Layout("pipeline x context", 4, ("strategy=pipeline", f"{CONTEXT}2"), 1, 2)
    for label in ("ddp", "zero1", "fsdp"):
        both = (*kinds[label], f"{PIPELINE}2", f"{CONTEXT}2")
        yield Layout(f"{label} x pipeline x context", 8, both, 2, 2)
    for schedule, each in SCHEDULES.items():
        if each > 1:
            chosen = ("strategy=fsdp", f"{PIPELINE}2", SCHEDULE + schedule)
            yield Layout(f"fsdp x pipeline, {schedule}", 4, chosen, 2, 2 * each)
    yield Layout("fsdp x expert", 2, (*kinds["fsdp"], f"{EXPERT}2"), 2)
    yield Layout("fsdp x expert", 4, (*kinds["fsdp"], f"{EXPERT}4"), 4)
    yield Layout("hsdp x expert", 4, (*hsdp, f"{EXPERT}2"), 4)
    yield Layout("fsdp x tensor x expert", 4, (*kinds["fsdp"], f"{TENSOR}2", f"{EXPERT}4"), 2)
    yield Layout("fsdp x context x expert", 4, (*kinds["fsdp"], f"{CONTEXT}2", f"{EXPERT}4"), 2)
    piped = (*kinds["fsdp"], f"{PIPELINE}2", f"{EXPERT}2")
    yield Layout("fsdp x pipeline x expert", 4, piped, 2, 2)


@functools.cache
def combinations() -> list[Combination]:
    """Return every combination, with kinds of recomputation in turn. ``_pairwise`` chooses the
    paired ones.
    """
    every: list[Combination] = []
    for layout in layouts():
        named = set(layout.label.split())
        models = [*WITH_EXPERTS]
        if "expert" not in named:
            models = [m for m in MODELS if m not in WITH_EXPERTS]
            if named & {"sequence", "context"}:
                models = [*WITH_SEQUENCES]
        # A schedule that runs a block's backward twice has no second copy of the saved activations.
        recomputed = [mode for mode in RECOMPUTED if mode != "selective" or not named & SPLITTING]
        for values in itertools.product(models, ("fp32", "bf16"), ACCUMULATION):
            how = recomputed[len(every) % len(recomputed)]
            every.append(Combination(layout, *values, how, paired=False))
    chosen = _pairwise(every)
    return [replace(c, paired=index in chosen) for index, c in enumerate(every)]


def combinations_in_tests() -> list[Combination]:
    """Return the paired combinations, and one for each other choice of layout, ranks and model."""
    groups: dict[tuple[Layout, str], list[Combination]] = {}
    for c in combinations():
        groups.setdefault((c.layout, c.model), []).append(c)
    chosen: list[Combination] = []
    for index, ones in enumerate(groups.values()):
        chosen += [c for c in ones if c.paired] or [ones[index % len(ones)]]
    return chosen


def combinations_in_every_run() -> list[Combination]:
    """Return one paired combination of each row, with the precisions in turn where it has both."""
    rows: dict[str, list[Combination]] = {}
    for c in combinations():
        if c.paired:
            rows.setdefault(c.layout.label, []).append(c)
    chosen: list[Combination] = []
    for index, ones in enumerate(rows.values()):
        alike = [c for c in ones if c.precision == ("bf16", "fp32")[index % 2]] or ones
        chosen.append(alike[index % len(alike)])
    return chosen


def factors(combination: Combination) -> dict[str, object]:
    """Return the value of each factor: the layout's settings and the other dimensions."""
    layout_settings = dict(override.split("=") for override in combination.layout.overrides)
    settings = {key: layout_settings.get(key, "default") for key in _settings()}
    return {
        **settings,
        "ranks": combination.layout.ranks,
        "model": combination.model,
        "precision": combination.precision,
        "accumulation": combination.accumulation,
        "recomputed": combination.recomputed,
    }


@functools.cache
def _settings() -> tuple[str, ...]:
    keys = (override.split("=")[0] for layout in layouts() for override in layout.overrides)
    return tuple(dict.fromkeys(keys))


def _pairwise(every: list[Combination]) -> set[int]:
    """Choose combinations that cover all rows and all pairs of two factors' values.

    Greedy: the next one has the most new pairs for its cost. Several tries with slightly changed
    costs are made, and the cheapest is kept. A set of pairs is an integer with one bit per pair:
    (model gpt, precision bf16) is 1, the next is 2, ...
    """
    bits: dict[object, int] = {}
    masks = []
    for c in every:
        pairs = [c.layout.label, *itertools.combinations(factors(c).items(), 2)]
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs))
    cost = [_cost(c) for c in every]
    order = random.Random(0)
    guesses = [cost, *([each * order.uniform(0.7, 1.3) for each in cost] for _ in range(5))]
    covers = [_without_needless(_covering(masks, guess), masks, cost) for guess in guesses]
    return min(covers, key=lambda cover: sum(cost[index] for index in cover))


def _cost(c: Combination) -> float:
    """Return its approximate run time in units of 0.2 s, fitted to measurements of 105
    combinations.

    In bf16 the reference computes the micro-batches one by one, too.
    """
    each = 1.0 if c.model != "mlp" else 0.2 * c.steps
    of_ranks = c.layout.ranks * (each + 0.1 * c.layout.stages)
    return 5 + of_ranks + (2 if c.precision == "bf16" else 0)


def _without_needless(chosen: set[int], masks: list[int], cost: list[float]) -> set[int]:
    """Leave out combinations whose pairs are all covered by others, the most expensive first."""
    for index in sorted(chosen, key=lambda i: (-cost[i], i)):
        others = functools.reduce(operator.or_, (masks[i] for i in chosen if i != index))
        if masks[index] | others == others:
            chosen = chosen - {index}
    return chosen


def _covering(masks: list[int], cost: list[float]) -> set[int]:
    left = functools.reduce(operator.or_, masks)
    chosen = set()
    while left:
        best = max(range(len(masks)), key=lambda i: (masks[i] & left).bit_count() / cost[i])
        chosen.add(best)
        left &= ~masks[best]
    return chosen


def markdown() -> str:
    """Return the page: one row per layout with the counts of its combinations."""
    rows: dict[str, list[Combination]] = {}
    for c in combinations():
        rows.setdefault(c.layout.label, []).append(c)
    lines = [
        "| layout | ranks | models | combinations | paired |",
        "| --- | --- | --- | --- | --- |",
    ]
    for label, ones in rows.items():
        ranks = ", ".join(map(str, sorted({c.layout.ranks for c in ones})))
        models = ", ".join(dict.fromkeys(c.model for c in ones))
        lines.append(
            f"| {label} | {ranks} | {models} | {len(ones)} | {sum(c.paired for c in ones)} |"
        )
    total, paired = len(combinations()), sum(c.paired for c in combinations())
    lines.append(f"| | | | {total} | {paired} |")
    default = len(combinations_in_every_run())
    slow = len(combinations_in_tests()) - default
    counts = {"total": total, "paired": paired, "default": default, "slow": slow}
    return INTRODUCTION.format(table="\n".join(lines), **counts)


INTRODUCTION = """\
# Parity with a single process

The layouts that tests compare with plain torch in one process. `python
tests/support/parity_table.py` writes this page; `test_parity.py` runs combinations.

Each row is a layout. A combination of a row is a choice of these:

| factor | values |
| --- | --- |
| number of ranks, model | as in the table below |
| precision | fp32, bf16 |
| accumulation | 1, 2 |
| recomputation | none, whole blocks, some operations; they alternate between combinations |

A combination runs the comparison of `axonlaunch verify` for two steps (an mlp in bf16 for six),
with the tolerances of that command. It compares learning rates, losses, all gradients,
gradient norms, parameters, buffers and optimizer states.

| command | runs |
| --- | --- |
| `scripts/test` | {default} of the {total} combinations, one of each row |
| `scripts/test --slow` | {slow}: the other paired ones, and one for each other choice of layout, \
ranks and model. Every pair of values of two factors (including settings of the layout) is in one \
of the {paired} paired combinations |
| `scripts/test --sweep` | all {total} with all comparisons of `verify`: \
six steps, an evaluation, a prediction, a checkpoint |

{table}
"""


if __name__ == "__main__":
    PAGE.write_text(markdown())
