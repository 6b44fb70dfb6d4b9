"""Interface of loggers: objects on the main rank that receive metrics by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axonlaunch.system.text.units import Counted

Number = int | float


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Describes the logged run.

    Attributes:
        name: Name of the run.
        run_dir: Run folder, which exists.
        config: Configuration as nested plain values, as in ``config.yaml``: with the names of
            environment variables instead of their values.
        resumed_at: Step of the checkpoint that was loaded; None if the run starts at step 0.
        ids: Ids of this run at external services, by name of the logger. A logger adds its id for
            the next start of the run. Empty if the run was not resumed.
        counted: Unit that the loss counts, used in names of metrics.
    """

    name: str
    run_dir: Path
    config: dict[str, Any]
    resumed_at: int | None = None
    ids: dict[str, str] = field(default_factory=dict)
    counted: Counted = "tokens"


class Logger:
    """Base class of loggers. Only ``log`` must be implemented.

    Only the main rank creates loggers. Each is created and called in a separate thread, one call at
    a time, so training does not wait for it. The first exception is reported, and training
    continues. After three failures in a row the logger is switched off. If creating or starting it
    fails, that is tried again after 1 and 5 seconds.

    Attributes:
        rewinds: Whether ``start`` removes entries after ``run.resumed_at``. If it does not, a
            resumed run skips the steps before the last one that was logged, so that the steps of
            the logger never decrease.
    """

    rewinds = False

    def start(self, run: RunInfo) -> None:
        """Begin or continue the log of a run; called once, before ``log``."""

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Log the metrics of a training step, or of an evaluation after it.

        Args:
            metrics: For a step: loss, lr, grad_norm, tokens, tokens_per_s, step_s,
                peak_memory_bytes, epoch, tokens_seen, data_wait_s; with fp16 also skipped and
                loss_scale; with experts expert_load; on a GPU also mfu, reserved_bytes,
                active_bytes, alloc_retries, power_w, utilization, temperature_c. For an
                evaluation: eval_loss, perplexity, eval_tokens, unigram_entropy, eval_NAME for each
                metric, and eval_loss/NAME and perplexity/NAME for each source of a mix. If the loss
                counts something else, the names contain ``images``, ``samples`` or ``targets``
                instead of ``tokens``. Unknown values are omitted.
            step: Number of optimizer steps done, never lower than in the previous call.
        """
        raise NotImplementedError

    def close(self, *, failed: bool) -> None:
        """End the log; called once, also after training raised an exception."""
