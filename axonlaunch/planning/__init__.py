"""What a run would take, estimated without running it."""
