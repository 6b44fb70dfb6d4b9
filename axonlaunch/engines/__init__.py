"""Engines: a strategy carried out for one model, behind one interface (``base``)."""
