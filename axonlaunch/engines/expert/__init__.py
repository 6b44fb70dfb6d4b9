"""Expert parallelism: ranks hold different experts, and tokens travel to their experts."""
