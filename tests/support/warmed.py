"""Imports, in the fork server of the tests' commands, all modules that a command may import later.

It also makes Hydra parse its grammar, find its plugins and read its defaults. This takes as long as
everything else before the ranks start.
"""

import importlib
import os
import pkgutil

import axonlaunch
from axonlaunch import config

# PYTHONPATH was only for finding this file; ranks must not find the other files of this folder.
os.environ.pop("PYTHONPATH", None)
PACKAGES = ("cli", "launch", "planning", "verification")
for package in PACKAGES:
    for module in pkgutil.walk_packages(
        [f"{folder}/{package}" for folder in axonlaunch.__path__], f"axonlaunch.{package}."
    ):
        importlib.import_module(module.name)
of_rich = ("rich.panel", "rich.progress", "rich.status", "rich.table")
for name in ("pydantic.types", "typer._adapters", *of_rich):
    importlib.import_module(name)
config.load(["strategy=fsdp", "train.steps=1", "data=text", "data.files=[a]"])
