"""Memory of kernels and libraries that fake tensors do not show."""
