"""Compares a layout with the reference and decides the verdict."""
