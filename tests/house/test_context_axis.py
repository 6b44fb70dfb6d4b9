"""Counts the files that name the context axis outside of its engine.

Code that treats all axes alike loops over ``config.axes.AXES``. A file may name this axis if it
does something that only this axis needs.
"""

from __future__ import annotations

import re

from support.package_source import sources

NAMED_IN = {
    "config/axes.py",  # its entry in the table
    "config/consistency/layout.py",  # the property
    "config/problems/other_names.py",  # hints for other tools' names
    "config/schema.py",  # its section of the configuration
    "engines/build.py",  # creates its engine
    "engines/mesh_engine.py",  # splits batches with it
    "models/fake/output_regions.py",  # positions of its ranks
    "models/specs/model_spec.py",  # models that it cannot divide
    "planning/search/candidates.py",  # lengths for which it is considered
    "planning/throughput/analytic_work.py",  # its communication
    "preflight/parallelism.py",  # its problems
}
_NAME = re.compile(
    r"\bcontext\.degree\b|\b(?:layout|plan|strategy)\.context\b|[\"'](?:cp|context)[\"']"
    r"|\bContext(?:Axis|Config)\b|\bcontext_(?:problems|group)\b"
)


def test_context_axis_is_named_in_at_most_12_files() -> None:
    named_in = {
        source.path
        for source in sources()
        # A kubeconfig has contexts of its own.
        if not source.path.startswith(("engines/context/", "launch/external/kubernetes/"))
        and any(_NAME.search(line) for line in source.lines)
    }
    assert named_in == NAMED_IN
    assert len(named_in) <= 12
