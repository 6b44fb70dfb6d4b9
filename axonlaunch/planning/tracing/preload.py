"""Imports modules in the fork server of commands that trace a step, compile or build a pipeline.

These commands need torch's compiler and its pipelines, which other runs never import.
"""

import gc
import importlib

gc.disable()
importlib.import_module("axonlaunch.planning.tracing.stage_trace")
gc.freeze()
gc.enable()
