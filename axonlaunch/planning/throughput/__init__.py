"""Step time and tokens per second of a layout."""
