"""What a step computes in: its types, and loss scaling where fp16 needs it."""
