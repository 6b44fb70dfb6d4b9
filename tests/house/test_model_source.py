"""Counts the files that know of models of transformers.

Other files ask a model's source (``models/facts/source.py``), so that a new kind of model, or a new
question about models, is added in one place.
"""

from __future__ import annotations

import re

from support.package_source import sources

NAMED_IN = {
    "config/options/model.py",  # the keys of model=hf
    "config/schema.py",  # path and initial weights of a run's model, also for the tokenizer
    "models/source_of.py",  # chooses the source of a model
    "models/hf/source.py",  # that source
    "models/hf/model_spec.py",  # weights are read or random
}
_TESTED = re.compile(r"isinstance\(.*\bHuggingFaceConfig\b")


def test_hf_configuration_is_named_in_at_most_5_files() -> None:
    named_in = {s.path for s in sources() if any("HuggingFaceConfig" in line for line in s.lines)}
    assert named_in == NAMED_IN
    assert len(named_in) <= 5


def test_hf_configuration_is_tested_by_isinstance_at_most_3_times() -> None:
    assert sum(bool(_TESTED.search(line)) for s in sources() for line in s.lines) <= 3


def test_hf_option_is_named_only_where_it_is_defined_and_listed() -> None:
    """Other files call functions beside its keys, or its source."""
    named_in = {
        source.path
        for source in sources()
        if "hf" in source.texts and not source.path.startswith("models/hf/")
    }
    assert named_in == {
        "config/options/model.py",
        "cli/configuration/ls.py",  # the list of proved layouts
    }


def test_hf_package_is_imported_only_by_the_source_of_a_model() -> None:
    importing = {
        source.path
        for source in sources()
        if not source.path.startswith("models/hf/")
        and any(module.startswith("axonlaunch.models.hf") for module in source.imports)
    }
    assert importing == {"models/source_of.py"}
