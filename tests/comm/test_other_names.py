"""Long names of classes, names of backends, and identifiers of NCCL communicators."""

from __future__ import annotations

import pytest
import torch

import axonlaunch as ax
from axonlaunch.comm.connection import nccl


def test_long_class_names_are_aliases() -> None:
    assert ax.DistributedDataParallel is ax.DDP
    assert ax.FullyShardedDataParallel is ax.FSDP


def test_mock_backend_and_nccl_backend_are_backends() -> None:
    assert ax.World.mock(2).run(lambda world: world.backend is ax.MockBackend) == [True, True]
    assert ax.Backend("nccl") is ax.NcclBackend


def test_an_nccl_unique_id_is_128_bytes_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(128))
    monkeypatch.setattr(nccl, "status", lambda: nccl.NcclStatus(available=True))
    monkeypatch.setattr(torch.cuda.nccl, "unique_id", lambda: content)
    unique_id = ax.NcclUniqueId.create()
    assert unique_id == content == ax.NcclUniqueId(bytes(unique_id))
    assert isinstance(unique_id, ax.NcclUniqueId)
    with pytest.raises(ValueError, match="has 128 bytes, not 3"):
        ax.NcclUniqueId(b"abc")


def test_an_nccl_unique_id_without_nccl_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = nccl.NcclStatus(available=False, reason="this torch is built without NCCL")
    monkeypatch.setattr(nccl, "status", lambda: status)
    with pytest.raises(ax.NcclError, match="this torch is built without NCCL"):
        ax.NcclUniqueId.create()
