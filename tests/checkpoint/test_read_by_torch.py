"""A checkpoint can be read by ``torch.distributed.checkpoint`` without axonlaunch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.configured import run_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.format import index
from axonlaunch.checkpoint.format.torch_archive import archive_header
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine

CONFIG = [
    *("model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4"),
    *("data=synthetic_tokens", "data.sequence_length=12", "train.global_batch_size=8"),
]
READ = """
import pickle, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")
folder, converted, loaded = sys.argv[1:]
dcp_to_torch_save(folder, converted)
state = torch.load(converted)
for tensors in state.values():
    for tensor in tensors.values():
        tensor.fill_(7)
reader = dcp.FileSystemReader(folder)
dcp.load(state, storage_reader=reader, no_dist=True)
torch.save(state, loaded)
assert not [name for name in sys.modules if name.startswith("axonlaunch")]
"""


def train_and_save(run_dir: Path, *overrides: str) -> dict[str, Tensor]:
    """Train two steps on two mock ranks, save, and return the full tensors of the state."""
    chosen = run_config([*CONFIG, *overrides, "launch.nproc=2"])
    layout = Layout.of(chosen, world_size=2)

    def on_rank(world: World) -> dict[str, Tensor]:
        loader = rank_loader(
            chosen, data.build_dataset(chosen.data), layout=layout, rank=world.rank
        )
        engine = build_engine(chosen, world, sample=sample_inputs(loader.dataset))
        for step in range(2):
            engine.train_step(loader.batch(step))
        state = engine.state_dict()
        Saver(run_dir, world=world, retention=Retention(newest=1)).save(state, step=2, samples=16)
        return {
            f"{section}.{name}": (t.full_tensor() if isinstance(t, DTensor) else t).clone()
            for section, tensors in state.items()
            for name, t in tensors.items()
        }

    return {name: tensor for state in World.mock(2).run(on_rank) for name, tensor in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("strategy=fsdp",), ("strategy=tensor", "model=llama_debug", "model.vocab_size=257")],
    ids=["fsdp", "uneven tensor shards"],
)
def test_torch_reads_the_tensors_of_two_ranks_to_the_bit(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    expected = train_and_save(tmp_path / "run", *overrides)
    saved = checkpoint.latest(tmp_path / "run")
    assert saved is not None
    outputs = [tmp_path / "converted.pt", tmp_path / "loaded.pt"]
    script = [sys.executable, "-I", "-c", READ]
    subprocess.run([*script, saved.path, *outputs], check=True, cwd=tmp_path)
    for file in outputs:
        state = torch.load(file)
        read = {f"{section}.{name}": t for section in state for name, t in state[section].items()}
        assert read.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read[name].dtype == tensor.dtype, name
            assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize(
    ("dtype", "shape"), [*((name, (3, 4)) for name in sorted(index._DTYPES)), ("int8", (0, 4))]
)
def test_archive_header_and_bytes_are_a_file_of_torch_save(
    dtype: str, shape: tuple[int, ...]
) -> None:
    tensor = torch.full(shape, 3.0).to(getattr(torch, dtype))
    content = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    file = io.BytesIO(archive_header(tensor.dtype, tensor.shape) + content)
    read = torch.load(file, weights_only=True)
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(read.to(torch.complex128), tensor.to(torch.complex128))
