"""Every layout that the tests compare with a single process, and the page that lists them.

``python tests/support/parity_table.py`` writes that page, ``tests/parity/README.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "parity" / "README.md"
BATCH = 24

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
    "vit": [
        *("model=vit", "model.hidden_size=32", "model.image_size=8", "model.num_channels=1"),
        *IMAGES,
    ],
}
WITH_SEQUENCES = ("gpt", "llama")

TENSOR, PIPELINE = "strategy.tensor.degree=", "strategy.pipeline.degree="
CONTEXT = "strategy.context.degree="
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
"""Schedules, and the stages that each puts on a rank."""


@dataclass(frozen=True)
class Layout:
    """A way to lay a run out.

    Attributes:
        label: Its row on the page.
        ranks: Of the world.
        overrides: What chooses it.
        data_ranks: Ranks that share the batch.
        stages: Of its pipeline.
        repeats: Whether the same row has it on another number of ranks, or another engine on as
            many.
    """

    label: str
    ranks: int
    overrides: tuple[str, ...]
    data_ranks: int
    stages: int = 1
    repeats: bool = False


@dataclass(frozen=True)
class Combination:
    """A layout, a model, an arithmetic and a number of forwards a step.

    Attributes:
        accumulation: Micro-batches of a step, or rounds of a pipeline's schedule.
        fast: Whether the default test run has it.
    """

    layout: Layout
    model: str
    precision: str
    accumulation: int
    fast: bool

    @property
    def overrides(self) -> list[str]:
        """What makes the run, without the model."""
        samples = BATCH // self.layout.data_ranks // self.accumulation
        chosen = [*self.layout.overrides, f"train.precision={self.precision}"]
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
        """What makes the model: a first block, a last and one between, or enough for the stages."""
        blocks = 3 if self.layout.stages == 1 else max(4, self.layout.stages)
        return [*MODELS[self.model], f"model.num_hidden_layers={blocks}"]

    def __str__(self) -> str:
        words = (self.layout.label, self.layout.ranks, self.model, self.precision)
        return "-".join(map(str, (*words, self.accumulation))).replace(" ", "_")


def layouts() -> Iterator[Layout]:
    """Yield every layout."""
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
            repeats = ranks in (1, counts[-1])  # one rank does as single does
            yield Layout(label, ranks, overrides, ranks, repeats=repeats)
    for ranks in (4, 8):
        yield Layout("hsdp", ranks, hsdp, ranks, repeats=ranks == 8)
    for degree in (2, 4):
        tensor, repeats = ("strategy=tensor", f"{TENSOR}{degree}"), degree == 4
        yield Layout("tensor", degree, tensor, 1, repeats=repeats)
        parts = (*tensor, "strategy.tensor.sequence_parallel=true")
        yield Layout("tensor, sequence", degree, parts, 1, repeats=repeats)
    for schedule, each in SCHEDULES.items():
        for degree in (2, 4):
            chosen = ("strategy=pipeline", f"{PIPELINE}{degree}", SCHEDULE + schedule)
            label, repeats = f"pipeline, {schedule}", degree * each != 4
            yield Layout(label, degree, chosen, 1, degree * each, repeats=repeats)
    for label in ("ddp", "zero1", "zero2", "fsdp", "fsdp, offload full"):
        repeats = label in ("zero1", "zero2", "fsdp, offload full")
        yield Layout(f"{label} x tensor", 4, (*kinds[label], f"{TENSOR}2"), 2, repeats=repeats)
        both = (*kinds[label], f"{PIPELINE}2")
        yield Layout(f"{label} x pipeline", 4, both, 2, 2, repeats=repeats)
    for label in ("ddp", "zero1", "fsdp", "fsdp, no_shard"):
        both = (*kinds[label], f"{TENSOR}2", f"{PIPELINE}2")
        # Eight processes of it have the curve of one in tests/launch.
        yield Layout(f"{label} x tensor x pipeline", 8, both, 2, 2, repeats=True)
    yield Layout("hsdp x tensor", 8, (*hsdp, f"{TENSOR}2"), 4)
    yield Layout("hsdp x pipeline", 8, (*hsdp, f"{PIPELINE}2"), 4, 2, repeats=True)
    yield Layout("tensor x pipeline", 4, ("strategy=tensor", f"{TENSOR}2", f"{PIPELINE}2"), 1, 2)
    for label in ("ddp", "zero1", "fsdp"):
        yield Layout(f"{label} x context", 4, (*kinds[label], f"{CONTEXT}2"), 2)
    yield Layout("context", 2, (f"{CONTEXT}2",), 1)
    yield Layout("tensor x context", 4, ("strategy=tensor", f"{TENSOR}2", f"{CONTEXT}2"), 1)
    yield Layout("pipeline x context", 4, ("strategy=pipeline", f"{CONTEXT}2"), 1, 2)
    for label in ("ddp", "zero1", "fsdp"):
        both = (*kinds[label], f"{PIPELINE}2", f"{CONTEXT}2")
        yield Layout(f"{label} x pipeline x context", 8, both, 2, 2, repeats=label != "ddp")
    for schedule, each in SCHEDULES.items():
        if each > 1:
            chosen = ("strategy=fsdp", f"{PIPELINE}2", SCHEDULE + schedule)
            yield Layout(f"fsdp x pipeline, {schedule}", 4, chosen, 2, 2 * each)


def combinations() -> list[Combination]:
    """Return every combination; of each layout that repeats none one is fast, models in turn."""
    found = []
    for index, layout in enumerate(layouts()):
        words = set(layout.label.split())
        models = [m for m in MODELS if m in WITH_SEQUENCES or not words & {"sequence", "context"}]
        turn = models[index % len(models)]
        for model, precision, accumulation in itertools.product(models, ("fp32", "bf16"), (1, 3)):
            usual = "bf16" if index % 4 == 3 else "fp32"
            often = 1 + 2 * (index % 2) if layout.ranks < 8 else 1
            fast = (model, precision, accumulation) == (turn, usual, often)
            fast = fast and not layout.repeats
            found.append(Combination(layout, model, precision, accumulation, fast))
    return found


def markdown() -> str:
    """Return the page: a row a layout, its combinations counted."""
    rows: dict[str, list[Combination]] = {}
    for one in combinations():
        rows.setdefault(one.layout.label, []).append(one)
    lines = ["| layout | ranks | models | combinations | in every test run |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for label, ones in rows.items():
        ranks = ", ".join(map(str, sorted({one.layout.ranks for one in ones})))
        models = ", ".join(dict.fromkeys(one.model for one in ones))
        fast = sum(one.fast for one in ones)
        lines.append(f"| {label} | {ranks} | {models} | {len(ones)} | {fast} |")
    total, fast = len(combinations()), sum(one.fast for one in combinations())
    rows_fast = sum(any(one.fast for one in ones) for ones in rows.values())
    lines.append(f"| | | | {total} | {fast} |")
    return INTRODUCTION.format(
        table="\n".join(lines), total=total, fast=fast, rows=len(rows), rows_fast=rows_fast
    )


INTRODUCTION = """\
# Parity with a single process

Written by `python tests/support/parity_table.py`; `test_parity.py` runs what it lists.

A row is a layout. Each of its combinations (number of ranks, model, fp32 or bf16, accumulation 1
or 3) trains from the same weights on the same samples as a single process, and its losses,
gradients and parameters are compared: in fp32 to 1e-5 relative, in bf16 to 0.02 for losses.

Every test run (`scripts/test`) has {fast} of the {total} combinations, from {rows_fast} of the
{rows} rows; `scripts/test --all` has all {total}.

{table}
"""


if __name__ == "__main__":
    PAGE.write_text(markdown())
