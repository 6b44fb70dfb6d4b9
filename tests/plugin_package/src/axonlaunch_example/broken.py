"""What an entry point that can't be imported does: nothing, until it is chosen."""

raise RuntimeError("no licence")
