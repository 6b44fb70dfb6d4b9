"""What of torch is set for a run's process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from configured import run_config

from axonlaunch.training.arithmetic import configure_arithmetic


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.benchmark
    yield
    configure_arithmetic(run_config([]).train)
    torch.backends.cudnn.benchmark = cudnn
    torch.set_float32_matmul_precision(precision)


def test_a_deterministic_run_refuses_what_is_not_and_fills_no_memory() -> None:
    torch.backends.cudnn.benchmark = True
    configure_arithmetic(run_config(["train.deterministic=true"]).train)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_any_other_run_leaves_torch_as_it_comes() -> None:
    configure_arithmetic(run_config(["train.deterministic=true"]).train)
    configure_arithmetic(run_config([]).train)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.get_float32_matmul_precision() == "highest"


def test_matrix_products_in_fp32_are_as_precise_as_the_run_says() -> None:
    configure_arithmetic(run_config(["train.matmul_precision=high"]).train)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32
