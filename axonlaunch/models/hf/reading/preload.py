"""Preloads transformers in the fork server, so that no rank has to import it.

Without transformers this does nothing; the configuration check reports the missing package.
"""

import contextlib
import gc

from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.models.hf.reading import library

gc.disable()
with contextlib.suppress(ConfigError):
    transformers = library.transformers()
    for name in ("AutoConfig", "AutoModelForCausalLM", "PreTrainedModel", "GenerationConfig"):
        getattr(transformers, name)  # accessing the attribute imports its module
gc.freeze()
gc.enable()
