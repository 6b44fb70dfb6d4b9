"""The source of models of transformers: a folder, a model id, or ``model.config`` only.

Importing this module imports neither torch nor transformers; methods import what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.facts.source import ModelDivision, ModelSource, SmallModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.tensors.saved_tensors import SavedTensors


class HuggingFaceSource(ModelSource):
    """The source of a causal language model of the installed transformers."""

    model: HuggingFaceConfig
    library = "transformers"
    sizes_key = "model.config"

    def problem(self, message: str) -> ConfigIssue:
        """Return a problem of the model with the configuration key that selects the model."""
        if self.model.path is None:
            return ConfigIssue("model.config", message, ...)
        return ConfigIssue("model.path", message, self.model.path)

    def device_problems(self, device: str) -> Iterator[ConfigIssue]:
        """Yield a problem if the attention can't be trained on a type of device."""
        if self.model.attention == "flex" and device != "cuda":
            message = "torch can't train with it on CPUs; use sdpa"
            yield ConfigIssue("model.attention", message, "flex")

    def fetch(self, *, weights: bool) -> None:
        """Download the model from the Hugging Face Hub to its cache."""
        from axonlaunch.models.hf.reading import files

        files.fetch(self.model, weights=weights and self.model.init == "pretrained")

    def folder(self) -> Path | None:
        """Return the model's folder, or its folder in the Hub's cache."""
        from axonlaunch.models.hf.reading import files

        return files.folder(self.model)

    def initial_weights(self) -> tuple[str, str] | None:
        """Return the key and path of initial weights, by default those of ``model.path``."""
        if self.model.weights is None and self.model.init == "pretrained":
            return "model.path", str(self.folder())
        return super().initial_weights()

    def random_weights(self) -> dict[str, Any]:
        """Return the setting of a run that initializes weights at random instead of from files."""
        return {"model.init": "random"}

    def size(self, name: str) -> int | None:
        """Return None: sizes are in ``config.json``, which is not read for a single size."""
        del name
        return None

    def setting(self, name: str, value: int) -> str:
        """Return the override that changes a size."""
        return f"{self.sizes_key}={{{name}: {value}}}"

    def without_router_loss(self) -> dict[str, Any]:
        """Return the setting of a run without a loss that balances experts."""
        config = {**self.model.config}
        config.pop("output_router_logits", None)  # it would contradict the other setting
        return {"model.config": config, "model.router_aux_loss": False}

    def with_vocabulary(self, size: int) -> dict[str, Any]:
        """Return the settings of a run that grow a smaller vocabulary."""
        from axonlaunch.models.hf.analysis.structure import structure

        key = "vocab_size"
        if size <= int(getattr(structure(self.model).typed, key, size)):
            return {}
        return {"model.config": {**self.model.config, key: size}}

    def has_grown_vocabulary(self) -> bool:
        """Return whether ``model.config`` sets a larger vocabulary than ``config.json`` has."""
        from axonlaunch.models.hf.architecture import architecture

        config, key = {**self.model.config}, "vocab_size"
        size = config.pop(key, None)
        if size is None or self.model.init != "pretrained":
            return False
        return bool(size > getattr(architecture(replace(self.model, config=config)), key, size))

    def vocabulary_parameters(self) -> list[str]:
        """Return the names of the parameters of the embedding and the head."""
        from axonlaunch.models.hf.analysis.structure import structure

        return [*structure(self.model).vocabulary]

    def scaled_sizes(self) -> ScaledSizes:
        """Return the sizes that planning scales, from the model's structure."""
        from axonlaunch.models.hf.analysis.scaled_sizes import scaled_sizes

        return scaled_sizes(self.model)

    def with_blocks(self, count: int) -> dict[str, Any]:
        """Return the settings of a run that change the number of blocks."""
        from axonlaunch.models.hf.analysis.scaled_sizes import with_depth

        return {"model.config": with_depth(self.model, count, self.scaled_sizes())}

    def block_kinds(self, blocks: Iterable[nn.Module]) -> list[str]:
        """Return the class of each block, with its layer type if there are several."""
        from axonlaunch.models.hf.analysis.structure import structure

        del blocks
        return list(structure(self.model).kinds)

    def published_plan(self) -> dict[str, str]:
        """Return transformers' tensor plan."""
        from axonlaunch.models.hf.analysis.structure import structure

        return dict(structure(self.model).tensor_plan)

    def reduce(self, division: ModelDivision) -> SmallModel:
        """Return a small model with few blocks of each kind, heads and experts."""
        from axonlaunch.models.hf.analysis import reduced

        small = reduced.reduce_model(self.model, division)
        return SmallModel(replace(small, init="random", weights=None), reduced.vocabulary(small))

    def check_small(self, small: RunConfig) -> int:
        """Check that a run's model consists of the same parts; return its number of parameters."""
        from axonlaunch.models.hf.analysis.reduced import refuse_unlike

        small_model: Any = small.model
        return refuse_unlike(self.model, small_model)

    def identity(self) -> dict[str, Any]:
        """Return ``config.json``, the attention, custom code and the version of transformers."""
        from axonlaunch.models.hf.analysis.reduced import identity

        return identity(self.model)

    def find_saved(self, shapes: Mapping[str, Sequence[int]]) -> SavedTensors:
        """Find the model's parameters among a checkpoint's tensors, as ``from_pretrained`` does.

        If the model has a larger vocabulary, the embedding and the head begin with the saved rows.
        """
        from axonlaunch.models.hf.analysis.structure import structure
        from axonlaunch.models.hf.reading.conversion import conversion
        from axonlaunch.models.tensors.grown_rows import grow_vocabulary

        model_structure = structure(self.model)
        saved = conversion(model_structure.model, shapes)
        grown = grow_vocabulary(saved.parameters, model_structure.vocabulary)
        return replace(saved, parameters=grown)

    def as_saved(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return parameters as ``save_pretrained`` writes them."""
        from axonlaunch.models.hf.analysis.structure import structure
        from axonlaunch.models.hf.reading.conversion import as_saved

        model_structure = structure(self.model)
        return as_saved(model_structure.model, tensors, blocks=model_structure.layers)

    def config_json(self) -> dict[str, Any]:
        """Return the content of ``config.json`` that ``from_pretrained`` needs."""
        from axonlaunch.models.hf.exported import config_json

        return config_json(self.model)

    def copy_files(self, folder: Path) -> list[str]:
        """Copy tokenizer files and the generation configuration."""
        from axonlaunch.models.hf.exported import copy_other_files

        return copy_other_files(self.model, folder)

    def set_special_tokens(
        self, content: dict[str, Any], folder: Path, ids: Mapping[str, int]
    ) -> None:
        """Name special tokens in ``config.json`` and in the generation configuration."""
        from axonlaunch.models.hf.exported import set_special_tokens

        set_special_tokens(content, folder, ids)

    def peft_base(self) -> dict[str, Any]:
        """Return the path or model id of the adapted model, and its revision."""
        return {
            "base_model_name_or_path": self.model.path,
            "revision": self.model.revision,
        }
