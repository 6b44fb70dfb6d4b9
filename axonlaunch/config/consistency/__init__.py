"""Rules between keys, and the layout of ranks that follows from a configuration."""
