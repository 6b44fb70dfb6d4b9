"""Imported by the fork server for a run of a model of transformers, so that no rank has to.

Where transformers is not installed it does nothing: who checks the configuration says so.
"""

import contextlib
import gc

from axonlaunch.config.errors import ConfigError
from axonlaunch.models.hf import library

gc.disable()
with contextlib.suppress(ConfigError):
    transformers = library.transformers()
    for name in ("AutoConfig", "AutoModelForCausalLM", "PreTrainedModel", "GenerationConfig"):
        getattr(transformers, name)  # which imports the module that it is in
gc.freeze()
gc.enable()
