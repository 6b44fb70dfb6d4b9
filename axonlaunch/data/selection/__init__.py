"""Selects files and their rows, and fixes the commits of data sets of the Hub."""
