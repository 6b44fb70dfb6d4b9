"""By hand, under torchrun."""

from datetime import timedelta

import small
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def states_at(step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


args = small.arguments()
dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (max(1, world // args.degree), args.degree))
torch.manual_seed(0)
model = DistributedDataParallel(small.Transformer())
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
sampler = DistributedSampler(small.Tokens(), shuffle=False)
loader = DataLoader(small.Tokens(), batch_size=args.batch // world, sampler=sampler)
progress, step = small.Progress(args.out), 0
if args.load:
    states = states_at(0)
    dcp.load(states, checkpoint_id=args.load)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    step = states["step"]
batches = iter(loader)
for _ in range(step):
    next(batches)
while step < args.steps:
    inputs, targets = next(batches)
    small.loss_of(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    progress(step)
if args.save:
    dcp.save(states_at(step), checkpoint_id=args.save)
small.report(model.module)
dist.destroy_process_group()
