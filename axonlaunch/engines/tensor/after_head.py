"""What a model does to its logits after the head, noted so that it can be done to a part of them.

While hidden states stand in for the logits, an operation on each number alone, as softcapping is,
is noted and passed over. Anything else that looks at the logits is refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from axonlaunch.models.spec import ModelOutputs

_OF_EACH_NUMBER = {
    *("div", "true_divide", "truediv", "mul", "multiply", "rmul", "tanh"),
    *("float", "to", "contiguous"),
}
_LOOKING = {"get", "size", "dim", "numel", "is_floating_point", "is_complex"}


class LogitsUsedError(Exception):
    """A model does with its logits what can't be done to a part of them; the text says what."""


class AfterHead(TorchFunctionMode):
    """Notes what happens to the stand-in for logits until the model returns it."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._stand_in: Tensor | None = None

    def begin(self, hidden: Tensor) -> Tensor:
        """Return what stands in for the logits; the model is in its forward, after the head."""
        self._steps = []
        self._stand_in = hidden.view_as(hidden)
        self.__enter__()  # type: ignore[no-untyped-call]
        return self._stand_in

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """End it: a forward hook of the model, which is called after errors too.

        Raises:
            LogitsUsedError: The model returns something else than its logits.
        """
        del module, args
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is None:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        logits = outputs.logits if isinstance(outputs, ModelOutputs) else outputs
        if logits is not None and logits is not stand_in:
            raise LogitsUsedError("the model returns something else than its logits")

    def apply(self, logits: Tensor) -> Tensor:
        """Do to logits what the model did to their stand-in."""
        for func, args, kwargs in self._steps:
            logits = func(logits, *args, **kwargs)
        return logits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        name = str(getattr(func, "__name__", func)).strip("_")
        if name in _LOOKING or not any(tensor is self._stand_in for tensor in tensors):
            return func(*args, **kwargs)
        if name not in _OF_EACH_NUMBER or len(tensors) > 1 or args[0] is not self._stand_in:
            raise LogitsUsedError(f"the model uses its logits in {name}")
        self._steps.append((func, args[1:], kwargs))
        return self._stand_in
