"""Commands that report on finished runs: runs, compare, diff and report."""
