"""Facts derived from a built model: parameters, sizes and FLOPs."""
