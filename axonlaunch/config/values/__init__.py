"""Plain values: YAML, URLs, optional keys and values of environment variables."""
