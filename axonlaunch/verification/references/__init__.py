"""The reference: the plain model in one process, its data and its tolerances."""
