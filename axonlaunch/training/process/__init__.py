"""Settings of a rank's process (arithmetic of torch, garbage collection), and notes on settings."""
