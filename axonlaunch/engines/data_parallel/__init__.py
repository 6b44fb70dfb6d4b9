"""Data parallelism: DDP, ZeRO-1 and FSDP."""
