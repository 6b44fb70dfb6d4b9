"""Records decisions within a forward: random masks and the choice of experts."""
