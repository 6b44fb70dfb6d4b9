"""What ranks are doing, and what a run was: hangs, stragglers, collectives, the report of a run."""
