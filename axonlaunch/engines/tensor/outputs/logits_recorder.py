"""Records operations on logits after the head, to apply them to chunks of the logits later.

Hidden states temporarily replace the logits in the model's forward. Elementwise operations on them,
such as softcapping, are recorded but not executed. Any other use of the logits is an error, except
for queries of their shape and type.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from axonlaunch.models.specs.model_spec import ModelOutputs

_SAME_VALUES = {"float", "to", "contiguous"}
_ELEMENTWISE = {
    *("div", "true_divide", "truediv", "mul", "multiply", "rmul", "tanh"),
    *_SAME_VALUES,
}
_METADATA_QUERIES = {"get", "size", "dim", "numel", "is_floating_point", "is_complex"}


class LogitsUsedError(Exception):
    """The model uses its logits in an operation that cannot be applied to chunks."""


class LogitsRecorder(TorchFunctionMode):
    """Records the operations on the placeholder for the logits until the model returns it."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._placeholder: Tensor | None = None

    def begin(self, hidden: Tensor) -> Tensor:
        """Return a placeholder for the logits and start recording; called by the deferred head."""
        self._steps = []
        self._placeholder = hidden.view_as(hidden)
        self.__enter__()  # type: ignore[no-untyped-call]
        return self._placeholder

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Stop recording. A forward hook of the model, also called after errors.

        Raises:
            LogitsUsedError: The model returns something other than its logits.
        """
        del module, args
        placeholder, self._placeholder = self._placeholder, None
        if placeholder is None:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        logits = outputs.logits if isinstance(outputs, ModelOutputs) else outputs
        if logits is not None and logits is not placeholder:
            raise LogitsUsedError("the model returns something other than its logits")

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the recorded operations to logits."""
        for func, args, kwargs in self._steps:
            logits = func(logits, *args, **kwargs)
        return logits

    def changes(self) -> list[str]:
        """Return the names of recorded operations that change the logits' values."""
        names = [_name(func) for func, _, _ in self._steps]
        return [name for name in names if name not in _SAME_VALUES]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        name = _name(func)
        if name in _METADATA_QUERIES or not any(tensor is self._placeholder for tensor in tensors):
            return func(*args, **kwargs)
        if name not in _ELEMENTWISE or len(tensors) > 1 or args[0] is not self._placeholder:
            raise LogitsUsedError(f"the model uses its logits in {name}")
        self._steps.append((func, args[1:], kwargs))
        return self._placeholder


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")
