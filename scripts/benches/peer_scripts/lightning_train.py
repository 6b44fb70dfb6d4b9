# ruff: noqa: ARG002
"""With Lightning's Trainer."""

from datetime import timedelta

import lightning as L
import small
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self, lr, progress):
        super().__init__()
        self.model, self.lr, self.progress = small.Transformer(), lr, progress

    def training_step(self, batch, index):
        return small.loss_of(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, index):
        self.progress(self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


args = small.arguments()
L.seed_everything(0)
strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=args.timeout))
if args.degree > 1:
    strategy = ModelParallelStrategy(tensor_parallel_size=args.degree)
trainer = L.Trainer(
    accelerator="cpu",
    devices=args.ranks,
    strategy=strategy,
    max_steps=args.steps,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    enable_checkpointing=False,
    logger=False,
)
module = Module(args.lr, small.Progress(args.out))
loader = DataLoader(small.Tokens(), batch_size=args.batch // args.ranks)
trainer.fit(module, loader, ckpt_path=args.load and args.load / "state.ckpt")
if args.save:
    trainer.save_checkpoint(args.save / "state.ckpt")
small.report(module.model)
