"""Datasets in general: protocol, registry, order of samples, packing, loading and origin."""
