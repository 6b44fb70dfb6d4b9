"""An entry point that can't be imported; it has no effect until it is chosen."""

raise RuntimeError("no license")
