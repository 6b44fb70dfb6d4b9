"""Imported by the server that tests fork their commands from: what each would do first by itself.

Modules that commands import when they need them; and Hydra, when it first composes, parses its own
grammar, looks for its plugins and reads its defaults: as much as all else before a run's ranks.
"""

import importlib
import os
import pkgutil

import axonlaunch
from axonlaunch import config

# It was to find this file; what ranks start shall not find the others here.
os.environ.pop("PYTHONPATH", None)
ROOMS = ("cli", "launch", "planning", "verification")
for room in ROOMS:
    for module in pkgutil.walk_packages(
        [f"{folder}/{room}" for folder in axonlaunch.__path__], f"axonlaunch.{room}."
    ):
        importlib.import_module(module.name)
of_rich = ("rich.panel", "rich.progress", "rich.status", "rich.table")
for name in ("pydantic.types", "typer._adapters", *of_rich):
    importlib.import_module(name)
config.load(["strategy=fsdp", "train.steps=1", "data=text", "data.files=[a]"])
