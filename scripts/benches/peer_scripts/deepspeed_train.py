"""With DeepSpeed."""

from datetime import timedelta

import deepspeed
import small
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

args = small.arguments()
deepspeed.init_distributed("gloo", timeout=timedelta(seconds=args.timeout))
world = dist.get_world_size()
torch.manual_seed(0)
model = small.Transformer()
config = {
    "train_batch_size": args.batch,
    "train_micro_batch_size_per_gpu": args.batch // world,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
}
if args.degree > 1:
    config["tensor_parallel"] = {"autotp_size": args.degree}
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
sampler = DistributedSampler(small.Tokens(), shuffle=False)
loader = DataLoader(small.Tokens(), batch_size=args.batch // world, sampler=sampler)
progress, step = small.Progress(args.out), 0
if args.load:
    _, state = engine.load_checkpoint(str(args.load))
    step = state["step"]
batches = iter(loader)
for _ in range(step):
    next(batches)
while step < args.steps:
    inputs, targets = next(batches)
    engine.backward(small.loss_of(engine(inputs), targets))
    engine.step()
    step += 1
    progress(step)
if args.save:
    engine.save_checkpoint(str(args.save), client_state={"step": step})
small.report(engine.module)
dist.destroy_process_group()
