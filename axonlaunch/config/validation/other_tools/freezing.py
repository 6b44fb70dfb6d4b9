"""Translates LLaMA-Factory's freezing of all parameters except those of some layers."""

from __future__ import annotations

from axonlaunch.config.validation.other_tools.translation import Translation

_LARGEST = 1000


def set_trained_layers(translation: Translation, *, prefix: str = "") -> None:
    """Translate the number of trained layers, from the end or from the start if it is negative.

    Args:
        prefix: Beginning of the names of LLaMA-Factory's keys.
    """
    layers, modules = f"{prefix}freeze_trainable_layers", f"{prefix}freeze_trainable_modules"
    extra = f"{prefix}freeze_extra_modules"
    if translation.flag("use_llama_pro"):  # the number of layers decides which
        return
    count = int(translation.number(layers, 2))
    if not 0 < abs(count) <= _LARGEST:
        translation.leave_out(layers, "name the trained parameters in train.unfreeze")
        return
    numbers = range(-count, 0) if count > 0 else range(-count)
    names = _names(translation, modules) or ["all"]
    trained = [
        f"*.{number}.{'' if name == 'all' else name}*" for name in names for number in numbers
    ]
    trained += [f"*{name}*" for name in _names(translation, extra)]
    translation.set("train.freeze", ["*"], layers)
    translation.set("train.unfreeze", trained, layers, modules, extra)


def _names(translation: Translation, key: str) -> list[str]:
    """Return names that are separated by commas, or a list."""
    names = [name for each in translation.items(key) if each for name in str(each).split(",")]
    return [name.strip() for name in names if name.strip()]
