"""With Lightning Fabric."""

from datetime import timedelta

import small
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

args = small.arguments()
strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=args.timeout))
if args.degree > 1:
    strategy = ModelParallelStrategy(
        parallelize_fn=lambda model, mesh: model, tensor_parallel_size=args.degree
    )
fabric = Fabric(accelerator="cpu", devices=args.ranks, strategy=strategy)
fabric.launch()
fabric.seed_everything(0)
model = small.Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer = fabric.setup(model, optimizer)
loader = DataLoader(small.Tokens(), batch_size=args.batch // fabric.world_size)
batches = iter(fabric.setup_dataloaders(loader))
progress, step = small.Progress(args.out), 0
if args.load:
    states = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(args.load / "state.ckpt", states)
    step = states["step"]
for _ in range(step):
    next(batches)
while step < args.steps:
    inputs, targets = next(batches)
    fabric.backward(small.loss_of(model(inputs), targets))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    progress(step)
if args.save:
    fabric.save(args.save / "state.ckpt", {"model": model, "optimizer": optimizer, "step": step})
small.report(model.module)
