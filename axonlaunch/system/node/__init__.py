"""The node: cores, memory, limits and allocator settings."""
