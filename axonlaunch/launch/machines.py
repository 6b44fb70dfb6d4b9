"""One of several machines of a run, which starts its own ranks once all have agreed.

They meet at machine 0. Torch's store carries what they tell each other; every machine composes and
checks the same words itself, and a difference is told before a rank starts.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, Problem, RunConfig
from axonlaunch.config.layout import world_size
from axonlaunch.config.problem import plain
from axonlaunch.launch import run_folder
from axonlaunch.launch.conclusion import Record, conclude, tell_crash
from axonlaunch.launch.console import RunConsole
from axonlaunch.launch.local import Meeting, attempt
from axonlaunch.launch.prediction import Prediction

if TYPE_CHECKING:
    import torch.distributed as dist

LOST_S = 5.0
"""Seconds of silence after which a machine is lost: its processes have to be gone in ten."""
_OWN = ("launch.node_rank", "name", "run_dir")
"""What may differ between machines: each says the first itself, machine 0 decides the others."""


def train(
    config: RunConfig,
    problems: list[Problem],
    context: ForkServerContext,
    *,
    started: float,
    as_json: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Run this machine's ranks beside those of the others.

    Args:
        config: With ``launch`` settled; checked, and resolved unless there are problems.
        problems: What this machine can't run it for; the others are told.
        context: Of the warm fork server.
        started: ``time.time()`` when the user's command began.
        as_json: Keep standard output free.

    Returns:
        The exit status and, on machine 0, what was written to ``summary.json``.

    Raises:
        ConfigError: The machines can't meet, or differ; no rank was started.
    """
    problems = [*problems, *_unsaid(config)]
    if _unsaid(config):
        raise ConfigError(problems)
    launch, machine = config.launch, config.launch.node_rank
    assert machine != "auto"
    console = RunConsole(stream=sys.stderr if as_json else sys.stdout)
    store = _open(config, console)
    from axonlaunch.launch.peers import Peers, meet

    about = {
        "machine": socket.gethostname(),
        "config": configuration.leaves(configuration.to_tree(config)),
        "problems": [str(problem) for problem in problems],
    }
    try:
        met = meet(
            store,
            member=machine,
            members=launch.nnodes,
            about=about,
            timeout_s=launch.timeout_s,
            announce=lambda text: console.line(f"machine {machine}: {text}"),
        )
    except TimeoutError as missing:
        message = f"machines {missing} did not come within launch.timeout_s={launch.timeout_s:g}"
        raise ConfigError([Problem("launch.nnodes", message, launch.nnodes)]) from None
    assert launch.nproc != "auto" or problems
    peers = Peers(
        store,
        member=machine,
        members=launch.nnodes,
        first_ranks=[other * _count(config) for other in range(launch.nnodes)],
        lost_s=LOST_S,
        are_machines=True,
    )
    with ExitStack() as folder:
        if met is not None:
            try:
                _agreed(met)
                config = folder.enter_context(run_folder.create(config))
            except ConfigError as error:
                peers.tell("frozen", {"problems": [str(one) for one in error.problems]})
                peers.watch()
                peers.farewell()
                raise
            peers.tell("frozen", {"config": configuration.to_yaml(config)})
        else:
            config = _frozen(peers, config)
        peers.watch()
        meeting = Meeting(
            address=launch.master_addr,
            port=_port(config),
            token=f"{_token(config)}/ranks",
            node_rank=machine,
            others=peers,
        )
        prediction = Prediction(context, config)
        record = Record(started, console, prediction)
        if machine:
            count, first = _count(config), machine * _count(config)
            which = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
            console.line(
                f"machine {machine} of {launch.nnodes}: {which} of {world_size(config)}; "
                f"machine 0 at {launch.master_addr} tells how it goes"
            )
        try:
            outcome = attempt(config, context, meeting, record, console)
        finally:
            console.stop()
            prediction.end()
        if machine == 0:
            return conclude(config, outcome, record, console)
    if outcome.crash is not None:
        tell_crash(config, outcome.crash)
        return 1, None
    interrupted = outcome.killed or (outcome.finished is not None and outcome.finished.interrupted)
    return (130 if interrupted else 0), None


def _unsaid(config: RunConfig) -> list[Problem]:
    """Return what a machine must know of the others, and nobody said."""
    launch, found = config.launch, []
    if launch.node_rank == "auto":
        message = f"which of the {launch.nnodes} machines is this? write 0 on the first"
        found.append(Problem("launch.node_rank", message, "auto"))
    elif launch.node_rank >= launch.nnodes:
        message = f"the machines are 0 to {launch.nnodes - 1} with launch.nnodes={launch.nnodes}"
        found.append(Problem("launch.node_rank", message, launch.node_rank))
    if launch.master_addr == "auto":
        message = "where is machine 0? write an address by which the others reach it"
        found.append(Problem("launch.master_addr", message, "auto"))
    if launch.backend == "mock":
        message = "its ranks are threads of one process; use auto, or launch.nnodes=1"
        found.append(Problem("launch.backend", message, "mock"))
    return found


def _count(config: RunConfig) -> int:
    return 1 if config.launch.nproc == "auto" else config.launch.nproc


def _port(config: RunConfig) -> int:
    return 29500 if config.launch.master_port == "auto" else config.launch.master_port


def _token(config: RunConfig) -> str:
    """Return what this run's keys begin with.

    Raises:
        ConfigError: The file of the secret can't be read.
    """
    file = config.launch.token_file
    if file is None:
        return "axonlaunch"
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        message = f"can't read it ({error.strerror})"
        raise ConfigError([Problem("launch.token_file", message, file)]) from None
    if not secret:
        raise ConfigError([Problem("launch.token_file", "it is empty", file)])
    return hashlib.sha256(secret).hexdigest()


def _open(config: RunConfig, console: RunConsole) -> dist.Store:
    """Listen on machine 0, or reach it.

    Raises:
        ConfigError: The address is not machine 0's, its port is taken, or nobody answers.
    """
    launch, port, token = config.launch, _port(config), _token(config)
    import torch.distributed as dist

    from axonlaunch.comm.rendezvous import meet_at

    lead = launch.node_rank == 0
    if not lead:
        console.line(f"machine {launch.node_rank}: joining {launch.master_addr}:{port}")
    try:
        store = meet_at(
            launch.master_addr,
            port,
            listens=lead,
            timeout=timedelta(seconds=launch.timeout_s),
        )
    except ValueError as error:
        raise ConfigError([Problem("launch.master_addr", str(error), launch.master_addr)]) from None
    except (dist.DistNetworkError, dist.DistStoreError):
        message = (
            f"nobody listens at port {port} there for {launch.timeout_s:g} s; start machine 0, and "
            "see that no firewall is between"
        )
        raise ConfigError([Problem("launch.master_addr", message, launch.master_addr)]) from None
    return dist.PrefixStore(token, store)


def _agreed(met: list[dict[str, Any]]) -> None:
    """Hold that every machine can run, and that all run the same.

    Raises:
        ConfigError: Every problem of every machine.
    """
    first, problems = met[0]["config"], []
    for machine, about in enumerate(met):
        where = f"machine {machine} ({about['machine']})"
        problems += [Problem("", f"{where}: {problem}") for problem in about["problems"]]
        if about["problems"] or met[0]["problems"]:
            continue
        for key in sorted({*first, *about["config"]} - {*_OWN}):
            here, there = first.get(key), about["config"].get(key)
            if here != there:
                message = f"{where} has {plain(there)}; start every machine with the same words"
                problems.append(Problem(key, message, here))
    if problems:
        raise ConfigError(problems)


def _frozen(peers: Any, config: RunConfig) -> RunConfig:
    """Take the configuration that machine 0 froze, and keep it here too.

    Raises:
        ConfigError: There is none, for the reasons that machine 0 tells.
    """
    try:
        told = peers.ask("frozen", timeout_s=config.launch.timeout_s)
    except TimeoutError:
        message = "machine 0 answers, but never began this run; is launch.token_file the same?"
        raise ConfigError(
            [Problem("launch.master_addr", message, config.launch.master_addr)]
        ) from None
    if "problems" in told:
        peers.watch()
        peers.farewell()
        raise ConfigError([Problem("", problem) for problem in told["problems"]])
    frozen = configuration.parsed(told["config"])
    run_folder.keep(frozen)
    own = {"launch.node_rank": config.launch.node_rank}
    return configuration.replaced(frozen, own)
