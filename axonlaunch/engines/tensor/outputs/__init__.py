"""Loss over a divided vocabulary or in chunks."""
