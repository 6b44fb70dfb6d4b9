"""Averages gradients over ranks in buckets."""
