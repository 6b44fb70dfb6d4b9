"""Configurations of runs on Kubernetes."""

from __future__ import annotations

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.launch.external.kubernetes.checks import with_folder_of_pods


def loaded(*overrides: str) -> RunConfig:
    """Return the configuration of a run on Kubernetes with a resolved run folder."""
    named = ["launch=kubernetes", "name=big", "launch.kubernetes.image=registry.example/train:1"]
    return with_folder_of_pods(configuration.load([*named, *overrides]))
