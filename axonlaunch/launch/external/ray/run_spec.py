"""Specification of a run on a Ray cluster, which is sent to its actors."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import is_on_cpu
from axonlaunch.config.options.launch import RayConfig
from axonlaunch.launch.launcher import used_cores


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Specification of a run.

    Attributes:
        name: Name of the run, which is that of its actor.
        run_dir: Run folder, which all nodes share.
        config: Configuration of the nodes as YAML.
        nnodes: Number of nodes.
        nproc: Number of ranks on each node.
        bundle: Resources of each node.
        max_restarts: Largest number of lost nodes.
        checkpoints: Folder or URL of the checkpoints; empty for the run folder.
        runtime_env: Ray's runtime environment of the processes; None: that of the command.
        token: Secret that the nodes share.
    """

    name: str
    run_dir: str
    config: str
    nnodes: int
    nproc: int
    bundle: dict[str, float]
    max_restarts: int
    checkpoints: str = ""
    runtime_env: dict[str, Any] | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @classmethod
    def of(cls, config: RunConfig) -> RunSpec:
        """Return the specification of a checked configuration.

        Args:
            config: Configuration with resolved ``name``, ``run_dir`` and ``launch.nproc``.
        """
        launch = config.launch
        assert launch.nproc != "auto"
        bundle = bundle_of(config)
        # Ray sets OMP_NUM_THREADS to the cores of an actor, which its ranks share.
        threads = launch.threads
        if threads == "auto":
            threads = max(1, int(bundle["CPU"]) // launch.nproc)
        settings = {"launch.name": "auto", "launch.threads": threads, "launch.ray": RayConfig()}
        return cls(
            name=str(config.name),
            run_dir=config.run_dir,
            config=configuration.to_yaml(configuration.with_values(config, settings)),
            nnodes=int(launch.nnodes),
            nproc=launch.nproc,
            bundle=bundle,
            max_restarts=launch.max_restarts,
            checkpoints=config.checkpoint.path or "",
        )

    @property
    def needs(self) -> str:
        """Resources of each node in words."""
        return ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())

    @property
    def submission(self) -> str:
        """Name of this submission, the same on all nodes. The token can't be found from it."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:16]

    def with_new_token(self) -> RunSpec:
        """Return the specification for another start of the run."""
        return dataclasses.replace(self, token=secrets.token_hex(32))


def bundle_of(config: RunConfig) -> dict[str, float]:
    """Return the resources of each node of a run."""
    launch, options = config.launch, config.launch.ray
    assert launch.nproc != "auto"
    cpus = used_cores(config) if options.cpus == "auto" else options.cpus
    gpus = {} if is_on_cpu(launch) else {"GPU": float(launch.nproc)}
    return {"CPU": float(cpus), **gpus, **options.resources}
