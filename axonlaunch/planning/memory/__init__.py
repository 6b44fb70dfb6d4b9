"""Peak memory per rank: traced, replayed through the allocator, or analytic."""
