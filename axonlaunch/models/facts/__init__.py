"""Facts of a model: its source, parameters, sizes and FLOPs."""
