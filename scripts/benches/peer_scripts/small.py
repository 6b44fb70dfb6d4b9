"""The task of all peers: one transformer, one dataset; and functions that any user would add.

Faults of mistakes are here, too, so that no peer's script contains them.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, HIDDEN, LAYERS, HEADS = 256, 64, 128, 4, 4
LOG_EVERY = 10
FAULT, FAULTY_RANK, FAULTY_FORWARD = os.environ.get("PEERS_FAULT", ""), 1, 3


class Tokens(torch.utils.data.Dataset):
    """Sequences that follow from their index."""

    num_classes = VOCABULARY

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, pace = index % 61, 1 + index % 7
        tokens = (start + pace * torch.arange(LENGTH + 1)) % VOCABULARY
        return tokens[:-1], tokens[1:]


class Transformer(nn.Module):
    """A causal transformer of torch's layers; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                HIDDEN, HEADS, 4 * HIDDEN, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.forwards = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            if FAULT and self.forwards == FAULTY_FORWARD and dist.get_rank() == FAULTY_RANK:
                _fail()
        length = tokens.shape[-1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def _fail() -> None:
    if FAULT == "exception":
        raise RuntimeError("planted")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "collective":
        dist.all_reduce(torch.ones(7))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def final_loss(model: nn.Module) -> float:
    """Return the trained model's loss on samples that are the same for all peers."""
    samples = map(Tokens().__getitem__, range(8))
    inputs, targets = (torch.stack(list(x)) for x in zip(*samples, strict=True))
    model.eval()
    with torch.no_grad():
        return loss_of(model(inputs), targets).item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--degree", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    return parser.parse_args()


class Progress:
    """Writes the seconds of steps at intervals."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.seconds, self.since = out, [], time.perf_counter()

    def __call__(self, step: int) -> None:
        if self.out is not None and dist.get_rank() == 0 and (step == 1 or step % LOG_EVERY == 0):
            now = time.perf_counter()
            self.seconds.append((now - self.since) / (1 if step == 1 else LOG_EVERY))
            self.since = now
            self.out.write_text("\n".join(map(str, self.seconds)))


def report(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        print(f"final loss {final_loss(model):.6f}", flush=True)
