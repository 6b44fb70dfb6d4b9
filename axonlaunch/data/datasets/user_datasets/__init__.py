"""Datasets of users: their members, and their adaptation to the interface of datasets."""
