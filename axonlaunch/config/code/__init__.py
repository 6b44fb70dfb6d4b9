"""User code that a configuration names: plug-ins, targets and trust in foreign runs."""
