"""The rival: a script written by hand to train the same model under torchrun."""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from axonlaunch.config.options.model import GPTConfig
from axonlaunch.models.build import build_model


def arguments() -> argparse.Namespace:
    """Return the arguments of a rival."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--log-every", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Train the same GPT as axonlaunch."""
    args = arguments()
    dist.init_process_group("gloo")
    config = GPTConfig(
        hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=4
    )
    model: nn.Module = build_model(config)
    if args.strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard(model, model.get_submodule("layers").children())
    train(args, model, lambda tokens: model(tokens))


def shard(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shard each layer, and the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(
    args: argparse.Namespace, model: nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Train a model, and write the seconds of each logged step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(rank)
    tokens = torch.randint(0, 256, (args.batch // world, args.length + 1))
    seconds = []
    since = time.perf_counter()
    for step in range(1, args.steps + 1):
        logits = logits_of(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % args.log_every == 0):
            now = time.perf_counter()
            seconds.append((now - since) / (1 if step == 1 else args.log_every))
            since = now
            print(step, loss.item(), flush=True)
            args.out.write_text("\n".join(map(str, seconds)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
