"""A run on a Ray cluster, as the commands for jobs see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.launch.external.followed_job import JobState, decode_whole, shared_folder
from axonlaunch.launch.external.ray.cluster import connect_to_cluster, disconnect
from axonlaunch.launch.external.ray.run_actor import CALLS, ENDED, RUNNING, RayRun
from axonlaunch.launch.external.ray.run_spec import RunSpec

_ANSWER_S = 30.0
"""Timeout of calls of a run's actor in seconds."""
_LOST = "UNREACHABLE"
"""State of a run while the cluster or its actor does not answer."""


@dataclass
class RayJob:
    """A run on a Ray cluster.

    Attributes:
        address: Address of the cluster.
        spec: Specification of the run.
    """

    address: str
    spec: RunSpec
    _read: dict[int, int] = field(default_factory=dict)
    _is_lost: bool = False

    @classmethod
    def submit(cls, address: str, spec: RunSpec) -> RayJob:
        """Start a run. An actor of an earlier one with the same name, which has ended, is deleted.

        Raises:
            ConfigError: A run of this name or in this folder goes on, or the nodes of the cluster
                can't import axonlaunch.
        """
        for job in ray_jobs(address):
            state = job.state()
            if state.status is None and (shared := shared_folder(spec, job.spec)) is not None:
                key, folder = shared
                message = f"the run {job.name} uses it; stop that one, or choose another"
                raise ConfigError([ConfigIssue(key, message, folder)])
            if state.status is None and job.name == spec.name:
                message = f"a run of this name is {state.name.lower()}; choose another name"
                raise ConfigError([ConfigIssue("name", message, spec.name)])
        job = cls(address, spec)
        job._start()
        return job

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.spec.name

    @property
    def scheduler(self) -> str:
        """The job in words."""
        return "Ray"

    @property
    def run_dir(self) -> str:
        """Run folder, as the nodes see it."""
        return self.spec.run_dir

    @property
    def left(self) -> str:
        """Line for the user after Ctrl-C, which does not end the run."""
        return (
            f"{self.name} is still running; axonlaunch logs {self.name} -f follows it, "
            f"axonlaunch stop {self.name} stops it"
        )

    def state(self) -> JobState:
        """Return the current state."""
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            connect_to_cluster(self.address)
            actor = _actor_of(self.name)
            if actor is None:
                return JobState("DELETED", f"{self.name} has been deleted", 1)
            now: JobState = _answer(actor.state.remote())
        except (RayActorError, GetTimeoutError) as error:
            return self._lost(f"the actor of the run does not answer ({type(error).__name__})")
        except ConnectionError as error:
            disconnect()
            return self._lost(f"the cluster does not answer ({error})")
        except ConfigError as error:  # while it connects again
            return self._lost(str(error))
        if self._is_lost:
            self._is_lost = False
            return JobState(now.name, now.note or f"{self.name}: connected again", now.status)
        return now

    def read_log(self, *, rank: int = 0) -> str:
        """Return what was added since the last call to the output of the node of a rank."""
        from ray.exceptions import GetTimeoutError, RayActorError

        if self._is_lost:
            return ""
        node = rank // self.spec.nproc
        try:
            actor = _actor_of(self.name)
            if actor is None:
                return ""
            end, content = _answer(actor.read.remote(node, self._read.get(node, 0)))
        except (RayActorError, GetTimeoutError, ConnectionError):
            return ""
        text, length = decode_whole(bytes(content))
        self._read[node] = end - len(content) + length
        return text

    def stop(self) -> str:
        """Let the run save a checkpoint and end; return a line for the user.

        Raises:
            ConfigError: The run has ended.
        """
        now, actor = self.state(), _actor_of(self.name)
        if now.status is not None or actor is None:
            raise ConfigError([ConfigIssue("", now.note)])
        _answer(actor.stop.remote())
        return (
            f"{self.name} saves a checkpoint and ends; resume it with axonlaunch resume {self.name}"
        )

    def resume(self) -> str:
        """Start the run again in the same folder; return a line for the user.

        Raises:
            ConfigError: The run has not ended.
        """
        now = self.state()
        if now.status is None:
            raise ConfigError([ConfigIssue("", now.note or f"{self.name} is running")])
        self.spec = self.spec.with_new_token()
        self._start()
        return f"{self.name} resumes; axonlaunch logs {self.name} -f follows it"

    def _start(self) -> None:
        """Create the actor of the run, in place of that of an earlier run that has ended.

        Raises:
            ConfigError: A run of this name is starting, or the nodes of the cluster can't import
                axonlaunch, or can't set up ``launch.ray.runtime_env``.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RuntimeEnvSetupError

        if (ended := _find(self.name, ENDED)) is not None:
            ray.kill(ended)
        actor = ray.remote(RayRun).options(
            name=self.name,
            namespace=RUNNING,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=CALLS,
            runtime_env=self.spec.runtime_env,
        )
        try:
            run_actor = actor.remote(self.spec)
        except ValueError:  # its actor is not listed with a state before it has started
            if _find(self.name, RUNNING) is None:
                raise
            message = "a run of this name is starting; wait until axonlaunch jobs lists it"
            problem = ConfigIssue("name", message, self.name, is_transient=True)
            raise ConfigError([problem]) from None
        try:
            _answer(run_actor.state.remote())
        except GetTimeoutError:
            return  # its environment is being set up, or no node is free yet
        except RuntimeEnvSetupError as error:
            ray.kill(run_actor)
            reason = " ".join(str(error).split())[-200:]
            key = "launch.ray.runtime_env"
            raise ConfigError([ConfigIssue(key, f"can't be set up ({reason})")]) from None
        except RayActorError as error:
            ray.kill(run_actor)
            reason = " ".join(str(error).split())[-200:]
            message = f"the nodes of the cluster can't run axonlaunch ({reason}); install it there"
            raise ConfigError([ConfigIssue("launch.ray.address", message, self.address)]) from None

    def _lost(self, reason: str) -> JobState:
        self._is_lost = True
        return JobState(_LOST, f"{self.name}: {reason}; trying again")


def ray_jobs(address: str) -> list[RayJob]:
    """Return the runs of a cluster, by name.

    Raises:
        ConfigError: There is no cluster at this address.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    connect_to_cluster(address)
    named = ray.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in named if actor["namespace"] in (RUNNING, ENDED)}
    jobs = []
    for name in sorted(names):
        actor = _actor_of(name)
        if actor is not None:
            try:
                jobs.append(RayJob(address, _answer(actor.spec.remote())))
            except (RayActorError, GetTimeoutError):  # it has just ended, or has not started yet
                continue
    return jobs


def _answer(call: Any) -> Any:
    import ray

    return ray.get(call, timeout=_ANSWER_S)


def _actor_of(name: str) -> Any | None:
    """Return the actor of a run; None if there is none."""
    ended = _find(name, ENDED)
    return _find(name, RUNNING) if ended is None else ended


def _find(name: str, namespace: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
