"""What a logger is: an object on the main rank that takes numbers by step.

It decides nothing of when something is logged, and of no logger how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axonlaunch.events import Counted

Number = int | float


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that is logged.

    Attributes:
        name: Its name.
        run_dir: Its folder, which exists.
        config: Its configuration as nested plain values, as it is in ``config.yaml``: with the
            names of environment variables, not with their values.
        resumed_at: Steps done in the checkpoint that was loaded; None: it starts at step 0.
        ids: What a logger noted, by its own name, for the next start of this run: the id that a
            service gave to it. Empty where nothing is resumed.
        counted: What the loss has a target for, and ``log`` numbers are named by: tokens, images or
            other samples.
    """

    name: str
    run_dir: Path
    config: dict[str, Any]
    resumed_at: int | None = None
    ids: dict[str, str] = field(default_factory=dict)
    counted: Counted = "tokens"


class Logger:
    """Base of loggers; ``log`` alone has to be written.

    Only the main rank makes one. It is made and called in a thread of its own, one call at a time,
    so that training does not wait for it. The first exception is reported, and training continues.
    After three failures in a row the logger is switched off; if it can't be made or started, that
    is tried again after 1 and 5 seconds.

    Attributes:
        rewinds: Whether ``start`` removes what was logged after ``run.resumed_at``. A logger that
            can't do so is not called with steps below the last one that it was called with before
            the run was resumed, so that its steps never decrease.
    """

    rewinds = False

    def start(self, run: RunInfo) -> None:
        """Begin, or continue, the log of a run; called once, before ``log``."""

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Take the numbers of a step: training's, or those of an evaluation after it.

        Args:
            metrics: loss, lr, grad_norm, tokens, tokens_per_s, step_s, peak_memory_bytes, epoch,
                tokens_seen, data_wait_s, in fp16 skipped and loss_scale, and of a GPU mfu,
                reserved_bytes, active_bytes, alloc_retries, power_w, utilization, temperature_c; or
                eval_loss, perplexity, eval_tokens, unigram_entropy, and of each source of a mix
                eval_loss/NAME and perplexity/NAME. Of images or other samples, ``images`` or
                ``samples`` is in place of ``tokens``. What is unknown is left out.
            step: Optimizer steps done, never fewer than in the call before.
        """
        raise NotImplementedError

    def close(self, *, failed: bool) -> None:
        """End the log; called once, also where training raised."""
