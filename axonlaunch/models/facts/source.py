"""Answers questions about the origin of a model: files, sizes, initial weights, small copies.

``models/source_of.py`` chooses the source of a configuration. This module does not import
torch; methods import what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from axonlaunch.config import ConfigIssue, RunConfig, to_tree
from axonlaunch.config.options.model import INCLUDED_MODEL_CONFIGS, CustomConfig
from axonlaunch.config.values.optional_keys import weights_of
from axonlaunch.models.facts.scaled_sizes import ScaledSizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.tensors.saved_tensors import SavedTensors

LARGEST_SMALL_MODEL = 20_000_000
"""Maximum number of parameters of a model that stands for a larger one."""
_DEPTH, _DENSE_FIRST = "num_hidden_layers", "first_k_dense_replace"


class NotReducibleError(Exception):
    """There is no small model of this architecture; the message says why."""


@dataclass(frozen=True)
class ModelDivision:
    """How a layout splits a model and its small counterpart.

    Attributes:
        stages: Pipeline stages; each needs a block.
        tensor: Ranks that share each layer of the small model.
        original_tensor: Ranks that share each layer of the original model.
        block: Values of a row of a weight that no rank divides; 1 unless weights are quantized.
    """

    stages: int = 1
    tensor: int = 1
    original_tensor: int = 1
    block: int = 1


@dataclass(frozen=True)
class SmallModel:
    """A small model of the same architecture, with random weights.

    Attributes:
        config: Typed configuration of the group ``model``.
        vocab_size: Number of tokens that it accepts.
    """

    config: Any
    vocab_size: int


class ModelSource:
    """The source of a model that included or user code builds from its configuration.

    Subclasses are sources of models that are described by files.

    Attributes:
        model: Typed configuration of the group ``model``.
        library: Name of the installed package that the model's code is from; None for other code.
        sizes_key: Configuration key of the group that contains the model's sizes.
    """

    model: Any
    library: str | None = None
    sizes_key = "model"

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def code(self) -> Literal["included", "library", "user"]:
        """Origin of the model's code: this package, an installed library or the user."""
        if self.library is not None:
            return "library"
        return "included" if type(self.model) in INCLUDED_MODEL_CONFIGS else "user"

    def problem(self, message: str) -> ConfigIssue:
        """Return a problem of the model with the configuration key that selects the model."""
        if isinstance(self.model, CustomConfig):
            return ConfigIssue("model.target", message, self.model.target)
        return ConfigIssue("model.name", message, self.model.name)

    def device_problems(self, device: str) -> Iterator[ConfigIssue]:
        """Yield reasons why the model can't be trained on a type of device: ``cpu`` or ``cuda``."""
        del device
        yield from ()

    # Files and initial weights

    def fetch(self, *, weights: bool) -> None:
        """Download the model's files that are not on this node.

        Args:
            weights: Whether to download weights too, if training starts from them.

        Raises:
            ConfigError: The download fails.
        """

    def folder(self) -> Path | None:
        """Return the folder of the model's files; None without files.

        Raises:
            ConfigError: The files are not on this node.
        """
        return None

    def initial_weights(self) -> tuple[str, str] | None:
        """Return the configuration key of saved initial weights and their path, or None.

        Raises:
            ConfigError: The files of the model are not on this node.
        """
        path = weights_of(self.model)
        return None if path is None else ("model.weights", path)

    def random_weights(self) -> dict[str, Any]:
        """Return the settings of a run that initialize weights at random instead of from files."""
        return {}

    # Sizes and structure

    def size(self, name: str) -> int | None:
        """Return a size from the model's configuration; None if it has no such size.

        Args:
            name: Name of the size, such as ``vocab_size``.
        """
        value: int | None = getattr(self.model, name, None)
        return value

    def setting(self, name: str, value: int) -> str:
        """Return the override that sets a size: ``model.vocab_size=512``.

        Args:
            name: Name of the size, such as ``vocab_size``.
        """
        return f"{self.sizes_key}.{name}={value}"

    def without_router_loss(self) -> dict[str, Any]:
        """Return the settings of a run without a loss that balances experts."""
        has_loss = bool(getattr(self.model, "router_aux_loss", False))
        return {"model.router_aux_loss": False} if has_loss else {}

    def with_vocabulary(self, size: int) -> dict[str, Any]:
        """Return the settings of a run that grow a smaller vocabulary; {} if it can't be grown.

        Args:
            size: Number of tokens.

        Raises:
            ConfigError: The model can't be built.
        """
        del size
        return {}

    def has_grown_vocabulary(self) -> bool:
        """Return whether the vocabulary is larger than that of the pretrained weights.

        Raises:
            ConfigError: The model can't be built.
        """
        return False

    def vocabulary_parameters(self) -> list[str]:
        """Return the names of parameters that ``with_vocabulary`` grows, tied ones once.

        Raises:
            ConfigError: The model can't be built.
        """
        return []

    def scaled_sizes(self) -> ScaledSizes:
        """Return the sizes that planning scales.

        Raises:
            ConfigError: The model can't be built.
        """
        depth, dense = self.size(_DEPTH) or 0, self.size(_DENSE_FIRST) or 0
        leading = dense if dense < depth else 0  # otherwise all blocks are dense
        return ScaledSizes.of(self.model, num_blocks=depth, leading=leading)

    def with_blocks(self, count: int) -> dict[str, Any]:
        """Return the settings of a run that change the number of blocks.

        Args:
            count: New number of blocks: the leading ones and a multiple of the period.
                ``num_blocks`` is not 0.
        """
        depth, dense = self.size(_DEPTH) or 0, self.size(_DENSE_FIRST) or 0
        settings = {f"model.{_DEPTH}": count}
        if depth <= dense < count:  # all blocks stay dense
            settings[f"model.{_DENSE_FIRST}"] = count
        return settings

    def block_kinds(self, blocks: Iterable[nn.Module]) -> list[str]:
        """Return a name for the kind of each of the model's blocks."""
        return [type(block).__name__ for block in blocks]

    def published_plan(self) -> dict[str, str]:
        """Return the tensor plan that the model's code includes, in the code's own terms.

        Raises:
            ConfigError: The model can't be built.
        """
        return {}

    # A small model that stands for this one

    def reduce(self, division: ModelDivision) -> SmallModel | None:
        """Return a small model of the same architecture; None if the model is used as it is.

        Raises:
            ConfigError: The architecture can't be determined.
            NotReducibleError: There is no small model.
        """
        del division
        return None

    def check_small(self, small: RunConfig) -> int:
        """Check that a run's model can stand for this one; return its number of parameters.

        Raises:
            ConfigError: A model can't be built.
            NotReducibleError: The small model is too large or consists of other parts.
        """
        from axonlaunch.models.build import on_meta

        count = sum(p.numel() for p in on_meta(small, seed=0).parameters())
        if count > LARGEST_SMALL_MODEL:
            raise NotReducibleError(f"it has {count / 1e6:.0f}M parameters")
        return count

    def identity(self) -> dict[str, Any] | None:
        """Return everything that determines the model's computation; None if that is unknown."""
        return None

    # Names of tensors in files, and export

    def find_saved(self, shapes: Mapping[str, Sequence[int]]) -> SavedTensors:
        """Find the model's parameters among the tensors of safetensors files.

        Args:
            shapes: Shapes of the tensors by name.
        """
        from axonlaunch.models.tensors.saved_tensors import SavedTensors

        return SavedTensors.with_same_names(shapes)

    def as_saved(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return parameters with the names and in the form that files have.

        Args:
            tensors: Names and values of all parameters, in the order of the model.
        """
        return tensors

    def config_json(self) -> dict[str, Any]:
        """Return the content of the ``config.json`` next to exported weights.

        Raises:
            ConfigError: The architecture can't be determined.
        """
        content: dict[str, Any] = to_tree(self.model)
        return content

    def copy_files(self, folder: Path) -> list[str]:
        """Copy the model's files other than weights and ``config.json``; return their names.

        Raises:
            ConfigError: A file can't be copied.
        """
        del folder
        return []

    def set_special_tokens(
        self, content: dict[str, Any], folder: Path, ids: Mapping[str, int]
    ) -> None:
        """Name special tokens in exported files, if the model's files have them.

        Args:
            content: Content of ``config.json``, which is changed in place.
            folder: Folder with the exported files.
            ids: Token numbers by name: eos, bos or pad.
        """

    def peft_base(self) -> dict[str, Any] | None:
        """Return the keys of PEFT's ``adapter_config.json`` that name the adapted model.

        None if PEFT can't load the model.
        """
        return None
