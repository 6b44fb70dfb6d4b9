"""Commands that train, follow a run or use its model: train, watch, sample and profile."""
