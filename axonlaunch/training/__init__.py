"""Code that each rank runs: the worker, the training loop and its measurements."""
