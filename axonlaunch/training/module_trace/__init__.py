"""Records what the modules of a traced step computed; how it compares is ``diagnostics``'s."""
