"""Files of module traces, and their comparison. ``training.module_trace`` records the traces."""
