"""The commands that launch runs: dry runs, and functions for scripts and notebooks."""
