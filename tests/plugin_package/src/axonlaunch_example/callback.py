"""A callback that notes evaluations in a file."""

from __future__ import annotations

import axonlaunch as ax


@ax.register_callback("noting")
class Noting(ax.Callback):
    """Writes the metrics of each evaluation to a file in the run folder."""

    def evaluation(self, run: ax.RunState) -> None:
        """Append a line on the main rank."""
        if run.is_main:
            with (run.run_dir / "noted.txt").open("a") as file:
                file.write(f"{run.step} {dict(run.metrics)}\n")
