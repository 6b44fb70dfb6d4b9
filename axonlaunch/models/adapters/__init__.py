"""Low-rank adapters: LoRA, DoRA and adapters of packed experts."""
