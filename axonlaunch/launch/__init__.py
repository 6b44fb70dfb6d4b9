"""Launches runs: starts and watches ranks and shows their progress, without torch in the parent."""
