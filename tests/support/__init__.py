"""Helpers of the tests, imported as the package ``support``."""
