"""Doctor's report on GPUs with simulated NVML and copies."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from axonlaunch.cli.configuration import doctor as command
from axonlaunch.diagnostics.doctor import diagnose, gpus


class NVMLError(Exception):
    """NVML's error."""


class Nvml(SimpleNamespace):
    """Two healthy GPUs; keywords replace the results of NVML functions."""

    def __init__(self, **answers: Any) -> None:
        def refuse(*_: Any) -> None:
            raise NVMLError("Not Supported")

        super().__init__(
            NVMLError=NVMLError,
            NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
            NVML_VOLATILE_ECC=0,
            NVML_P2P_CAPS_INDEX_READ=0,
            NVML_P2P_CAPS_INDEX_NVLINK=2,
            NVML_P2P_STATUS_OK=0,
            NVML_TOPOLOGY_SYSTEM=50,
            nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
            nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetTotalEccErrors=lambda *_: 0,
            nvmlDeviceGetEccMode=lambda _: (1, 1),
            nvmlDeviceGetMigMode=refuse,
            nvmlDeviceGetCurrPcieLinkWidth=lambda _: 16,
            nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x1,
            nvmlDeviceGetTopologyCommonAncestor=lambda *_: 50,
            nvmlDeviceGetP2PStatus=lambda *_: 0,
        )
        self.__dict__.update(answers)


def report(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(**answers))  # type: ignore[arg-type]
    return gpus.nvml_report()


def test_healthy_gpus_have_a_topology_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"path": "between NUMA nodes", "nvlink": True, "peer_access": True}
    expected = {"topology": [{"between": [0, 1], **about}], "problems": [], "unknown": ""}
    assert report(monkeypatch) == expected


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ({"nvmlDeviceGetTotalEccErrors": lambda gpu, *_: 3 * gpu}, "GPU 1 had 3 uncorrected ECC"),
        ({"nvmlDeviceGetEccMode": lambda gpu: (gpu, 1)}, "GPU 0 has ECC turned off"),
        ({"nvmlDeviceGetMigMode": lambda gpu: (gpu, 1)}, "GPU 1 is divided by MIG"),
        (
            {"nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 8 if gpu else 16},
            "GPU 1 uses 8 of 16 PCIe lanes",
        ),
        (
            {"nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x60 * gpu},
            "GPU 1 is slowed down: it is too hot",
        ),
        (
            {"nvmlDeviceGetP2PStatus": lambda gpu, other, what: 1},
            "GPUs 0 and 1 can't access each other's memory",
        ),
    ],
)
def test_doctor_names_faulty_gpu(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], line: str
) -> None:
    [problem] = report(monkeypatch, **answers)["problems"]
    assert problem.startswith(line)


def test_without_nvml_and_with_a_driver_that_fails_it_is_said_why_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "install nvidia-ml-py" in gpus.nvml_report()["unknown"]

    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    assert "NVML fails: Driver Not Loaded" in report(monkeypatch, nvmlInit=fail)["unknown"]


def test_gpu_links_are_timed_with_cuda_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        """An event of a GPU on which ten copies take 10 ms."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            del other
            return 10.0

    monkeypatch.setattr(gpus, "_buffer", lambda device: torch.empty(8))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: j != 1)
    measured = gpus.link_report()
    ways = [(link["source"], link["target"]) for link in measured["links"]]
    assert ways == [
        *(("host", "cuda:0"), ("cuda:0", "host"), ("host", "cuda:1"), ("cuda:1", "host")),
        *(("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")),
    ]
    assert {link["gb_s"] for link in measured["links"]} == {round(10 * gpus.COPIED / 0.01 / 1e9, 1)}
    assert measured["problems"] == []
    assert measured["topology"][0]["peer_access"] is False
    assert measured["unreachable"] == [gpus._NO_PEERS.format(0, 1)]


@pytest.mark.parametrize("reported_gpus", [[], [{"between": [0, 1], "peer_access": True}]])
def test_cuda_peer_access_is_used_if_nvml_reports_no_links(
    reported_gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = [{"between": [0, 1], "path": None, "nvlink": None, "peer_access": False}]

    def call(context: Any, target: str, *, task: str) -> Any:
        del context, task
        if target.endswith("link_report"):
            return {"links": [], "problems": [], "topology": cuda, "unreachable": ["0 and 1"]}
        return {"topology": reported_gpus, "problems": [], "unknown": ""}

    monkeypatch.setattr(diagnose.forked_call, "call", call)
    gpu_report = diagnose._gpus(cast("Any", None))
    assert gpu_report["topology"] == (reported_gpus or cuda)
    assert gpu_report["problems"] == ([] if reported_gpus else ["0 and 1"])


def test_a_link_that_is_much_slower_than_the_others_is_named() -> None:
    rates = {("cuda:0", "cuda:1"): 200.0, ("cuda:1", "cuda:0"): 200.0, ("cuda:0", "cuda:2"): 20.0}
    links = [{"source": s, "target": t, "gb_s": rate} for (s, t), rate in rates.items()]
    [line] = gpus.slow_links(links)
    assert line.startswith("cuda:0 to cuda:2: 20 GB/s, but the median between GPUs is 200 GB/s")


def test_copies_that_fail_are_a_problem_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(context: Any, target: str, *, task: str) -> Any:
        del context, task
        if target.endswith("link_report"):
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")
        return {"topology": [], "problems": ["GPU 0 is hot"], "unknown": ""}

    monkeypatch.setattr(diagnose.forked_call, "call", call)
    assert diagnose._gpus(cast("Any", None))["problems"] == [
        "GPU 0 is hot",
        "copying between GPUs failed: CUDA error: unspecified launch failure",
    ]


def test_the_command_shows_links_and_problems() -> None:
    about = {"path": "one PCIe switch", "nvlink": False, "peer_access": True}
    gpu_report = {
        "topology": [{"between": [0, 1], **about}],
        "links": [{"source": "host", "target": "cuda:0", "gb_s": 25.0}],
        "problems": ["GPU 1 is slowed down: it is too hot"],
        "unknown": "",
    }
    rows = command._gpu_rows(gpu_report)
    assert [text for _, text in rows] == [
        "GPUs 0 and 1: one PCIe switch, no NVLink, peer access",
        "host to cuda:0: 25 GB/s",
        "[red]GPU 1 is slowed down: it is too hot[/red]",
    ]
