"""Engines of data parallelism: DDP, ZeRO-1 and FSDP."""
