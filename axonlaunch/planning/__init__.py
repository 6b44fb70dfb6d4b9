"""What a run would take, foretold without running it."""
