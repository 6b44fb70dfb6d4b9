"""With accelerate."""

from datetime import timedelta

import small
import torch
from accelerate import Accelerator, InitProcessGroupKwargs, ParallelismConfig, skip_first_batches
from torch.utils.data import DataLoader

args = small.arguments()
timeout = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=args.timeout))
parallelism = ParallelismConfig(tp_size=args.degree) if args.degree > 1 else None
accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout], parallelism_config=parallelism)
torch.manual_seed(0)
model = small.Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(small.Tokens(), batch_size=args.batch // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress, step = small.Progress(args.out), 0
if args.load:
    accelerator.load_state(str(args.load))
    step = int((args.load / "step").read_text())
for inputs, targets in skip_first_batches(loader, step) if step else loader:
    accelerator.backward(small.loss_of(model(inputs), targets))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    progress(step)
    if step == args.steps:
        break
if args.save:
    accelerator.save_state(str(args.save))
    if accelerator.is_main_process:
        (args.save / "step").write_text(str(step))
small.report(accelerator.unwrap_model(model))
accelerator.end_training()
