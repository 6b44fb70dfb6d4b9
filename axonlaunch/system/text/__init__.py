"""Text output: terminals, streams, units and formatting."""
