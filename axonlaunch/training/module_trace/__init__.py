"""Records the outputs and gradients of modules in traced steps; ``diagnostics`` compares them."""
