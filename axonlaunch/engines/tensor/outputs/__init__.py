"""Loss over a sharded vocabulary or in chunks."""
