"""Imported once by the fork server: whatever a rank would otherwise import by itself.

Torch imports some of it only when first used, which would cost every rank a second.
"""

import gc

import axonlaunch.launch.rank
import axonlaunch.models.gpt
import axonlaunch.models.llama
import axonlaunch.preflight  # noqa: F401

# Ranks share these objects' pages for as long as no garbage collection touches them.
gc.collect()
gc.freeze()
