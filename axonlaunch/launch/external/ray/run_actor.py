"""The actor of a run: places its nodes, replaces lost ones, and keeps its state and output.

It belongs to no command, and Ray restarts it if its node is lost; then all nodes start again. After
the run it hands its state and output over to an actor that only answers, so that a lost node does
not start the run again.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.problems.errors import INVALID, TRANSIENT
from axonlaunch.launch.external.followed_job import JobState
from axonlaunch.launch.external.ray.kept_state import KeptState, delete_state
from axonlaunch.launch.external.ray.node import Node
from axonlaunch.launch.external.ray.output import NodeOutput
from axonlaunch.launch.external.ray.run_spec import RunSpec

RUNNING, ENDED = "axonlaunch", "axonlaunch-ended"
"""Namespaces of the actors of runs."""
KEPT_S = 24 * 3600.0
"""Seconds after the end of a run until its state and output are deleted."""
_POLL_S = 1.0
_LEAVE_S = 30.0
"""Seconds in which the other nodes end after node 0. A lost one may not be replaced in time."""
_LOST = -1
"""In place of the exit status of a lost node."""
_DONE, _INTERRUPTED = 0, 130
CALLS = 16
"""Number of methods of an actor that run at the same time."""


class RayRun:
    """A run. Its methods are called in separate threads."""

    def __init__(
        self,
        spec: RunSpec,
        ended: JobState | None = None,
        outputs: Mapping[int, NodeOutput] | None = None,
    ) -> None:
        """Begin the run.

        Args:
            spec: Specification of the run.
            ended: State of a run that has ended, which is not started; otherwise None.
            outputs: NodeOutput of its nodes.
        """
        self._spec = spec
        # Behind all positions of an earlier output, which was lost with its actor.
        start = time.time_ns()
        self._outputs = defaultdict(lambda: NodeOutput(start=start), outputs or {})
        self._lock = threading.Lock()
        kept = KeptState() if ended else KeptState.load()
        self._is_stopping = kept.is_stopping
        self._lost = self._lost_before = kept.lost
        note = ": starts again, because a node was lost" if kept.lost else " is pending"
        self._state = ended or JobState("PENDING", f"{spec.name}{note}")
        threading.Thread(target=self._expire if ended else self._supervise, daemon=True).start()

    def spec(self) -> RunSpec:
        """Return the specification of the run, with which another command can start it again."""
        import ray

        environment = dict(ray.get_runtime_context().runtime_env)
        return dataclasses.replace(self._spec, runtime_env=environment or None)

    def state(self) -> JobState:
        """Return the current state."""
        return self._state

    def stop(self) -> None:
        """Let the nodes save a checkpoint and end."""
        self._is_stopping = True
        self._keep_state()

    def _keep_state(self) -> None:
        KeptState(self._lost, self._is_stopping).save()

    def append(self, node: int, text: bytes) -> None:
        """Add to the output of a node."""
        with self._lock:
            self._outputs[node] = self._outputs[node].with_text(text)

    def read(self, node: int, start: int) -> tuple[int, bytes]:
        """Return the output of a node from a position, and the position of its end."""
        return self._outputs[node].read(start)

    def _expire(self) -> None:
        time.sleep(KEPT_S)
        _leave()

    def _supervise(self) -> None:
        """Run to the end, and hand over to an actor that only answers."""
        import ray

        try:
            self._state = self._run()
        except Exception as error:  # of Ray
            reason = " ".join(str(error).split())
            self._state = self._failure(reason)
        record = ray.remote(RayRun).options(
            name=self._spec.name,
            namespace=ENDED,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=CALLS,
        )
        record_actor = record.remote(self._spec, self._state, dict(self._outputs))
        ray.get(record_actor.state.remote())
        delete_state()
        _leave()

    def _run(self) -> JobState:
        """Start the nodes, replace lost ones, and return the state at the end."""
        import ray
        from ray.util import placement_group, remove_placement_group

        name = self._spec.name
        _remove_group(name)  # of this actor on a node that was lost
        if not self._goes_on:
            return self._interruption() if self._is_stopping else self._failure("a node was lost")
        bundles = [self._spec.bundle] * self._spec.nnodes
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=f"axonlaunch {name}")
        nodes: dict[int, Any] = {}
        try:
            while True:
                if not self._is_placed(group):
                    return self._interruption()
                for number in range(self._spec.nnodes):
                    if number not in nodes:
                        nodes[number] = self._place_node(number, group)
                self._lost_before = self._lost
                statuses = self._attempt(nodes)
                if (state := self._judge(statuses)) is not None:
                    return state
                self._keep_state()
                # A node that did not end in time may wait for a node 0 that is gone.
                for number in range(self._spec.nnodes):
                    if number not in statuses:
                        ray.kill(nodes.pop(number))
        finally:
            for node in nodes.values():
                ray.kill(node)
            remove_placement_group(group)

    def _is_placed(self, group: Any) -> bool:
        """Wait until each node has its place; return whether the run goes on."""
        spec, ready = self._spec, group.ready()
        import ray

        while not self._is_stopping:
            done, _ = ray.wait([ready], timeout=_POLL_S)
            if done:
                return True
            note = f"{spec.name} waits: {spec.nnodes} nodes with {spec.needs} are not free yet"
            self._state = JobState("PENDING", note)
        return False

    def _place_node(self, number: int, group: Any) -> Any:
        """Create the actor of a node, which Ray restarts if it is lost."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {**self._spec.bundle}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        actor = ray.remote(Node).options(
            num_cpus=bundle.pop("CPU"),
            num_gpus=bundle.pop("GPU", 0),
            resources=bundle,
            scheduling_strategy=strategy,
            max_restarts=-1,
            max_concurrency=CALLS,
        )
        return actor.remote(self._spec, number, ray.get_runtime_context().current_actor)

    def _attempt(self, nodes: Mapping[int, Any]) -> dict[int, int]:
        """Run the processes of all nodes until they end; return their exit statuses.

        The status of a node is missing if it did not end in time after node 0.
        """
        import ray
        from ray.exceptions import RayActorError

        address = self._meet(nodes)
        if address is None:
            return {0: _INTERRUPTED}
        calls = {node.train.remote(*address): number for number, node in nodes.items()}
        self._state = JobState("RUNNING")
        statuses: dict[int, int] = {}
        lost: set[int] = set()
        deadline = float("inf")
        while calls and time.monotonic() < deadline:
            for call in ray.wait([*calls], timeout=_POLL_S)[0]:
                number = calls.pop(call)
                try:
                    answer = ray.get(call)
                except RayActorError:
                    if number not in lost:
                        self._note_loss(number)
                    # Nodes that go on wait for it; without node 0 they end.
                    if number and 0 not in statuses and self._goes_on:
                        time.sleep(_POLL_S if number in lost else 0)
                        lost.add(number)
                        calls[nodes[number].address.remote()] = number
                    else:
                        statuses[number] = _LOST
                    continue
                if number not in lost:
                    statuses[number] = answer
                    continue
                lost.remove(number)  # Ray has replaced it
                calls[nodes[number].train.remote(*address)] = number
            if self._is_stopping or 0 in statuses:
                for number in calls.values():
                    nodes[number].stop.remote()
            if 0 in statuses and deadline == float("inf"):
                deadline = time.monotonic() + _LEAVE_S
        return statuses

    @property
    def _goes_on(self) -> bool:
        """Whether the run continues after a node was lost."""
        return self._lost <= self._spec.max_restarts and not self._is_stopping

    def _meet(self, nodes: Mapping[int, Any]) -> tuple[str, int] | None:
        """Wait until Ray has started the actors of all nodes.

        Returns:
            The address and port at which they meet; None if the run is stopped before.

        Raises:
            RuntimeError: A node can't import axonlaunch.
        """
        import ray
        from ray.exceptions import RayActorError

        while not self._is_stopping:
            calls = [nodes[number].address.remote() for number in sorted(nodes)]
            waiting = calls
            while waiting and not self._is_stopping:
                _, waiting = ray.wait(calls, num_returns=len(calls), timeout=_POLL_S)
            if waiting:
                return None
            try:
                first: tuple[str, int] = ray.get(calls)[0]
            except RayActorError as error:
                if error.actor_init_failed:  # Ray does not start this actor again
                    reason = str(error).strip().splitlines()[-1]
                    message = f"a node can't run axonlaunch: {reason}; install it there"
                    raise RuntimeError(message) from None
                time.sleep(_POLL_S)
            else:
                return first
        return None

    def _note_loss(self, number: int) -> None:
        self._lost += 1
        self._keep_state()
        restarts = f"{self._lost} of launch.max_restarts={self._spec.max_restarts}"
        note = f"{self._spec.name}: node {number} was lost ({restarts})"
        self._state = JobState("RUNNING", note)

    def _judge(self, statuses: Mapping[int, int]) -> JobState | None:
        """Return the state at the end of the run; None if it starts again."""
        name, first = self._spec.name, statuses[0]
        if first == _DONE:
            return JobState("COMPLETED", f"{name}: completed", _DONE)
        was_lost = self._lost > self._lost_before
        if first == INVALID:
            return self._failure("configuration error", INVALID)
        if self._is_stopping or first == _INTERRUPTED:
            return self._interruption()
        could_not_start = first == TRANSIENT and not was_lost
        self._lost += could_not_start  # it counts as a restart too
        if (was_lost or could_not_start) and self._goes_on:
            reason = "a node was lost" if was_lost else "it could not start"
            note = f"{name}: starts again, because {reason}"
            self._state = JobState("PENDING", note)
            return None
        reason = "a node was lost" if was_lost else f"exit status {first} of node 0"
        return self._failure(reason, TRANSIENT if first == TRANSIENT else 1)

    def _failure(self, reason: str, status: int = 1) -> JobState:
        return JobState("FAILED", f"{self._spec.name}: failed ({reason})", status)

    def _interruption(self) -> JobState:
        name = self._spec.name
        note = f"{name} is stopped; resume it with axonlaunch resume {name}"
        return JobState("STOPPED", note, _INTERRUPTED)


def _leave() -> None:
    """End this actor, which Ray then does not restart."""
    import ray

    ray.kill(ray.get_runtime_context().current_actor)


def _remove_group(name: str) -> None:
    from ray.util import get_placement_group, remove_placement_group

    try:
        remove_placement_group(get_placement_group(f"axonlaunch {name}"))
    except ValueError:
        return
