"""Shards of encoded text: making, caching and checking them."""
