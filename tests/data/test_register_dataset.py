"""Custom datasets: registered, offered by a package, or given as ``module:name``."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.configured import estimate_config, run_config

from axonlaunch import config
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.options.data import SampleShape
from axonlaunch.data import build_dataset, register_dataset
from axonlaunch.data.datasets.dataset import Batch, DatasetInfo, DatasetWithoutText
from axonlaunch.data.datasets.loader import order_of
from axonlaunch.planning import estimate_cache
from axonlaunch.training import worker
from axonlaunch.training.text.sampling import continue_prompt
from axonlaunch.training.text.sampling_options import SamplingOptions

SMALL = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
SMALL += ["train.global_batch_size=8"]


@dataclass(frozen=True, kw_only=True)
class CountsConfig:
    name: str = "counts"
    file: str
    sequence_length: int = 8


class Counts(DatasetWithoutText):
    kind = "tokens"
    num_samples, num_eval_samples, num_classes = 64, 64, 256

    def __init__(self, config: CountsConfig) -> None:
        self.first = int(Path(config.file).read_text())
        self.sample_shape = (config.sequence_length,)

    def samples(self, indices: Any, *, split: str) -> Batch:
        rows = np.asarray(indices)[:, None] + np.arange(self.sample_shape[0] + 1) + self.first
        return Batch.from_numpy(rows[:, :-1] % 256, rows[:, 1:] % 256)


def shape_of(config: CountsConfig) -> SampleShape:
    return SampleShape(kind="tokens", shape=(config.sequence_length,), num_classes=256)


def test_registered_implementation_is_chosen_by_name_with_its_keys(tmp_path: Path) -> None:
    register_dataset("counts", config=CountsConfig, sample=shape_of)(Counts)
    (tmp_path / "first").write_text("3")
    overrides = [*SMALL, "data=counts", f"data.file={tmp_path}/first", "data.sequence_length=4"]
    chosen = run_config(overrides)
    assert chosen.data == CountsConfig(file=f"{tmp_path}/first", sequence_length=4)
    assert build_dataset(chosen.data).samples([2], split="train").inputs.tolist() == [[5, 6, 7, 8]]
    with pytest.raises(ConfigError, match=r"did you mean data\.sequence_length"):
        config.load([*overrides, "data.sequence_lenght=4"])
    with pytest.raises(ConfigError, match=r"data=count: .*did you mean counts\?"):
        config.load(["data=count"])


def test_estimate_reads_no_files_of_dataset_with_declared_shape() -> None:
    register_dataset("counts", config=CountsConfig, sample=shape_of, files=("file",))(Counts)
    from axonlaunch.planning.tracing.shape_only_data import with_file_placeholders

    composed = config.compose([*SMALL, "data=counts", "data.sequence_length=4"])
    assert with_file_placeholders(composed.tree)["data"]["file"] == "-"
    chosen = estimate_config([*SMALL, "data=counts", "data.file=-", "data.sequence_length=4"])
    assert build_dataset(chosen.data).sample_shape == (4,)


def test_an_estimate_makes_one_that_does_not_say_its_shape(tmp_path: Path) -> None:
    register_dataset("counts", config=CountsConfig)(Counts)
    (tmp_path / "first").write_text("3")
    chosen = estimate_config([*SMALL, "data=counts", f"data.file={tmp_path}/first"])
    assert chosen.data.name == "counts"
    with pytest.raises(ConfigError, match=r"data=counts: .*No such file"):
        estimate_config([*SMALL, "data=counts", "data.file=/nowhere"])


def test_one_that_gives_other_samples_than_it_says_is_refused(tmp_path: Path) -> None:
    def wrong(config: CountsConfig) -> SampleShape:
        return SampleShape(kind="tokens", shape=(config.sequence_length + 1,))

    register_dataset("counts", config=CountsConfig, sample=wrong)(Counts)
    (tmp_path / "first").write_text("3")
    message = (
        r"data\.name=counts: it is registered with samples of tokens \(9,\), which "
        r"estimates use, but returns tokens \(8,\); correct sample="
    )
    with pytest.raises(ConfigError, match=message):
        run_config([*SMALL, "data=counts", f"data.file={tmp_path}/first"])


def test_no_estimate_is_kept_of_one_that_is_not_included(tmp_path: Path) -> None:
    register_dataset("counts", config=CountsConfig)(Counts)
    (tmp_path / "first").write_text("3")
    chosen = run_config([*SMALL, "data=counts", f"data.file={tmp_path}/first"])
    assert not estimate_cache._is_ours(chosen)
    assert estimate_cache._is_ours(run_config([*SMALL, "data=synthetic_tokens"]))


# Offered by a package


def offer(folder: Path, name: str, target: str, source: str) -> None:
    """Create an installed package that offers a dataset."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[axonlaunch.datasets]\n{name} = {target}\n")
    (folder / f"{target.partition(':')[0]}.py").write_text(textwrap.dedent(source))


OFFERED = """
import numpy as np
from axonlaunch import register_dataset
from axonlaunch.data.datasets.dataset import Batch, DatasetWithoutText

@register_dataset("offered")
class Offered(DatasetWithoutText):
    "Zeros of a package."
    kind, num_samples, num_eval_samples, num_classes, sample_shape = "tokens", 9, 9, 2, (4,)

    def samples(self, indices, *, split):
        rows = np.zeros((len(indices), 4), dtype=np.int64)
        return Batch.from_numpy(rows, rows)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("offered_")]:
        del sys.modules[name]


def test_an_offered_one_is_imported_when_it_is_chosen_and_not_before(packages: Path) -> None:
    offer(packages, "offered", "offered_data:Offered", OFFERED)
    assert config.composer_of().options("data")["offered"] == "from offered_package"
    config.load(["data=synthetic_tokens"])
    assert "offered_data" not in sys.modules
    chosen = run_config([*SMALL, "data=offered", "train.global_batch_size=4"])
    assert build_dataset(chosen.data).samples([0], split="train").inputs.shape == (1, 4)
    assert config.composer_of().options("data")["offered"] == "Zeros of a package."


def test_a_broken_package_is_named_with_its_error_and_stops_no_other_run(packages: Path) -> None:
    offer(packages, "offered", "offered_broken:It", "raise RuntimeError('no license')")
    config.load(["data=synthetic_tokens"])
    assert "offered" in config.composer_of().options("data")
    with pytest.raises(ConfigError) as error:
        config.load(["data=offered"])
    assert str(error.value) == (
        "data.name=offered: it is offered by offered_package (entry point offered = "
        "offered_broken:It); importing it failed with RuntimeError: no license "
        f"({packages}/offered_broken.py:1)"
    )


def test_a_name_that_two_packages_offer_is_refused(packages: Path) -> None:
    offer(packages, "offered", "offered_one:It", "")
    info = packages / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[axonlaunch.datasets]\noffered = offered_two:It\n")
    with pytest.raises(ConfigError, match=r"offered_package .* and other .*keep only one"):
        config.load(["data=offered"])


# data=custom

PAIRS = """
import torch

class Pairs(torch.utils.data.Dataset):
    classes = ["a", "b", "c"]

    def __init__(self, count=100):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((1, 4, 4), float(index)), index % 3

class Tokens(Pairs):
    num_classes = 256

    def __getitem__(self, index):
        row = torch.arange(index, index + 9) % 256
        return row[:-1], row[1:]

class Ragged(Tokens):
    def __getitem__(self, index):
        row, following = super().__getitem__(index)
        return row[: 8 - index % 2], following

class Bare(Pairs):
    classes = property()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a module of datasets in the working folder."""
    (tmp_path / "pairs_of_a_test.py").write_text(PAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("pairs_of_a_test", None)


@pytest.mark.usefixtures("module")
def test_custom_takes_a_map_style_dataset_and_holds_its_last_samples_out() -> None:
    overrides = ["data=custom", "data.target=pairs_of_a_test:Pairs", "data.arguments={count: 60}"]
    chosen = run_config(
        [
            *overrides,
            "data.eval_fraction=0.1",
            "model=mlp",
            "model.input_size=16",
            "model.num_classes=3",
        ]
    )
    dataset = build_dataset(chosen.data)
    assert (dataset.kind, dataset.sample_shape, dataset.num_classes) == ("images", (1, 4, 4), 3)
    assert (dataset.num_samples, dataset.num_eval_samples) == (54, 6)
    batch = dataset.samples([0, 5], split="eval")
    assert batch.inputs[:, 0, 0, 0].tolist() == [54.0, 59.0]
    assert batch.targets.tolist() == [0, 2]


class Minimal:
    """A dataset without ``info``; its ``order`` is an unrelated attribute."""

    kind, num_classes, num_samples, num_eval_samples = "tokens", 256, 12, 4
    sample_shape, is_text, order = (4,), False, "by name"

    def samples(self, indices: Any, *, split: str) -> Batch:
        rows = np.asarray(indices)[:, None] + np.arange(5)
        return Batch.from_numpy(rows[:, :-1], rows[:, 1:])


class Described(Minimal):
    info = DatasetInfo(notes=("data: counts",), eval_parts={"first": range(2)})


def test_a_dataset_without_info_has_the_default_info() -> None:
    register_dataset("minimal")(Minimal)
    dataset = build_dataset(run_config([*SMALL, "data=minimal"]).data)
    assert dataset.info == DatasetInfo()
    assert dataset.samples([3], split="train").inputs.tolist() == [[3, 4, 5, 6]]
    places = np.arange(12)
    assert sorted(order_of(dataset, places, seed=1)) == [*places]


def test_the_info_of_a_registered_dataset_is_used() -> None:
    register_dataset("described")(Described)
    dataset = build_dataset(run_config([*SMALL, "data=described"]).data)
    assert dataset.info is Described.info


class Wrapper:
    """Passes on the members of another dataset, like many wrappers of datasets."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


def test_members_that_a_wrapper_passes_on_are_used() -> None:
    register_dataset("wrapped")(lambda: Wrapper(Described()))
    dataset = build_dataset(run_config([*SMALL, "data=wrapped"]).data)
    assert dataset.info is Described.info
    assert dataset.samples([3], split="train").inputs.tolist() == [[3, 4, 5, 6]]


@pytest.mark.usefixtures("module")
def test_custom_takes_pairs_of_tokens() -> None:
    chosen = run_config([*SMALL, "data=custom", "data.target=pairs_of_a_test:Tokens"])
    batch = build_dataset(chosen.data).samples([3], split="train")
    assert batch.inputs.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10]]
    assert batch.targets.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.usefixtures("module")
def test_samples_of_several_shapes_are_an_error_that_names_two() -> None:
    one_sample = ["launch.nproc=2", "train.global_batch_size=2"]  # per rank and step
    target = "data.target=pairs_of_a_test:Ragged"
    ragged = run_config([*SMALL, "data=custom", target, *one_sample]).data
    assert len(build_dataset(ragged).samples([2, 4, 2], split="train")) == 3
    message = r"inputs of sample 3 have shape \[7\], those of sample 2 \[8\]: .*; pad them, or"
    with pytest.raises(ConfigError, match=f"data.target=pairs_of_a_test:Ragged: {message}"):
        build_dataset(ragged).samples([2, 4, 3], split="train")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "is not of the form package.module:Class"),
        (
            "no_such_module:A",
            "No module named 'no_such_module'; write package.module:name, importable from where "
            "you start",
        ),
        ("math:pi", "is float, not a class or function"),
        (
            "builtins:object",
            "returned object, which is neither a map-style dataset (__len__ and __getitem__), nor "
            "a stream (__iter__), nor an axonlaunch Dataset: it has no kind, num_samples, "
            "num_eval_samples, sample_shape, samples, num_classes",
        ),
        ("builtins:dict", "its dataset is empty"),
        (
            "pairs_of_a_test:Bare",
            "the dataset has no attribute num_classes or vocab_size; set data.num_classes",
        ),
        (
            "pairs_of_a_test:Ragged",
            "inputs of sample 1 have shape [7], those of sample 0 [8]: a batch has samples of one "
            "shape; pad them, or make batches by a custom function, data.collate",
        ),
    ],
)
def test_invalid_registered_dataset_is_refused(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config([*SMALL, "data=custom", f"data.target={target}"])
    assert str(error.value) == f"data.target={target}: {message}"


class Letters(Counts):
    """Text of a to z, with each letter's number as its token."""

    is_text, num_classes = True, 26

    def __init__(self, config: CountsConfig) -> None:
        self.first, self.sample_shape = 0, (config.sequence_length,)

    def samples(self, indices: Any, *, split: str) -> Batch:
        rows = np.asarray(indices)[:, None] + np.arange(self.sample_shape[0] + 1)
        return Batch.from_numpy(rows[:, :-1] % 26, rows[:, 1:] % 26)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def test_custom_text_run_is_sampled_with_encode_and_decode_of_dataset(
    tmp_path: Path,
) -> None:
    register_dataset("letters_of_a_test", config=CountsConfig)(Letters)
    there = [f"run_dir={tmp_path}", f"data.file={tmp_path}", "data=letters_of_a_test"]
    short = ["strategy=single", "launch.nproc=1", "train.steps=1", "checkpoint.every=1"]
    short += ["train.eval_batches=0"]
    chosen = run_config([*SMALL, *there, *short])
    (tmp_path / "config.yaml").write_text(config.to_yaml(chosen))
    World.mock(1).run(lambda world: worker.run(chosen, world))
    text = continue_prompt(tmp_path, "abc", SamplingOptions(tokens=9))
    assert re.fullmatch("[a-z]{9}", text)
