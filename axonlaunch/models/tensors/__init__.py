"""Tensors of models: initial values, regions of DTensors, page-locked memory."""
