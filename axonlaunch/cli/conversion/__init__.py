"""Translates configurations of other tools to experiments.

The tables in ``formats`` say for each key which key here it becomes, that it needs no counterpart,
or what is missing.
"""
