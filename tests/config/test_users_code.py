"""An error in a user's code is reported with its file and line, before a rank starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.configured import run_config

from axonlaunch import config
from axonlaunch.config import ConfigError, ConfigIssue

CODE = """
from torch import nn, optim
import axonlaunch as ax

def fail():
    raise KeyError("width")  # line 6

class Data:
    def __init__(self, *, at="start"):
        if at == "start":
            fail()
    def __len__(self):
        return 64
    def __getitem__(self, index):
        fail()

class Ranked(optim.Optimizer):
    def __init__(self, params, lr, *, rank):
        super().__init__(params, {"lr": lr})

class Rateless(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

class Optimizer(optim.Optimizer):
    def __init__(self, params, lr=1e-3, *, scale=1.0):
        super().__init__(params, {"lr": lr})
    def step(self):
        fail()

@ax.register_model("width_of_nothing", inputs="tokens")
def build(width=8):
    fail()

ax.register_optimizer("scaled_by_nothing")(Optimizer)

@ax.register_logger("logs_to_nothing")
class Lines(ax.Logger):
    def __init__(self, *, file="lines.txt"):
        pass

@ax.register_loss("loss_of_nothing")
def loss(outputs, batch, *, smoothing=0.1):
    fail()
"""
MODULE = "code_of_a_user"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a user's module with an error in line 6."""
    file = tmp_path / f"{MODULE}.py"
    file.write_text(CODE)
    (tmp_path / "fails_at_once.py").write_text("\n\n\n{}['x']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    for name in (MODULE, "fails_at_once"):
        sys.modules.pop(name, None)


def refusals(*overrides: str) -> list[ConfigIssue]:
    with pytest.raises(ConfigError) as refused:
        run_config(["launch.nproc=1", *overrides])
    return refused.value.problems


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"model=custom model.target={MODULE}:build"], "model=custom: building it failed"),
        ([f"data=custom data.target={MODULE}:Data"], "data=custom: making it failed"),
        (
            [f"data=custom data.target={MODULE}:Data data.arguments.at=item"],
            "data=custom: making it failed",
        ),
        (
            [f"optimizer=custom optimizer.target={MODULE}:Optimizer"],
            f"optimizer.target={MODULE}:Optimizer: trying it on a small parameter failed",
        ),
    ],
)
def test_code_that_fails_is_reported_with_its_file_and_line(
    overrides: list[str], message: str, code: Path
) -> None:
    [issue] = refusals(*overrides[0].split())
    assert str(issue) == f"{message} with KeyError: 'width' ({code}:6)"
    assert 'raise KeyError("width")' in issue.traceback
    assert ", in fail" in issue.traceback


@pytest.mark.parametrize(
    "override", ["plugins=[fails_at_once]", "model=custom model.target=fails_at_once:build"]
)
def test_so_is_a_module_that_fails_while_it_is_imported(override: str, code: Path) -> None:
    [issue] = refusals(*override.split())
    assert str(issue).endswith(f"failed with KeyError: 'x' ({code.parent}/fails_at_once.py:4)")
    assert issue.traceback.endswith("KeyError: 'x'\n")


def test_a_mistake_has_no_traceback(code: Path) -> None:
    [issue] = refusals("model=custom", f"model.target={MODULE}:bild")
    assert issue.traceback == ""


def test_arguments_that_registered_code_does_not_take_are_keys_that_do_not_exist(
    code: Path,
) -> None:
    overrides = [
        "model=width_of_nothing model.arguments.widht=3",
        "optimizer=scaled_by_nothing optimizer.arguments.scal=2",
        "train.loss=loss_of_nothing train.loss_options.arguments.smooth=0.2",
    ]
    logger = "loggers=[{name: logs_to_nothing, arguments: {fil: x}}]"
    with pytest.raises(ConfigError) as refused:
        config.load([f"plugins=[{MODULE}]", *" ".join(overrides).split(), logger])
    assert [str(problem) for problem in refused.value.problems] == [
        "model.arguments.widht=3: there is no argument 'widht'; did you mean width? known: width",
        "optimizer.arguments.scal=2: there is no argument 'scal'; did you mean scale? known: lr, "
        "scale",
        "train.loss_options.arguments.smooth=0.2: there is no argument 'smooth'; did you mean "
        "smoothing? known: smoothing",
        "loggers[0].arguments.fil=x: there is no argument 'fil'; did you mean file? known: file",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            f"model=custom model.target={MODULE}:build model.arguments.widht=3",
            "model.arguments.widht=3: there is no argument 'widht'; did you mean width? known: ",
        ),
        (
            f"data=custom data.target={MODULE}:Data data.arguments.att=item",
            "data.arguments.att=item: there is no argument 'att'; did you mean at? known: at",
        ),
        (
            f"optimizer=custom optimizer.target={MODULE}:Optimizer optimizer.arguments.scal=2",
            "optimizer.arguments.scal=2: there is no argument 'scal'; did you mean scale? known: ",
        ),
    ],
)
def test_unknown_arguments_of_target_are_refused(overrides: str, message: str, code: Path) -> None:
    [issue] = refusals(*overrides.split())
    assert str(issue).startswith(message)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("Ranked", "missing a required argument: 'rank'; arguments that it takes: rank"),
        ("Rateless", "got an unexpected keyword argument 'lr'; arguments that it takes: none"),
    ],
)
def test_an_optimizer_by_its_target_that_misses_an_argument_names_it(
    optimizer: str, message: str, code: Path
) -> None:
    target = f"optimizer.target={MODULE}:{optimizer}"
    [issue] = refusals("optimizer=custom", target)
    assert re.sub("keyword-only ", "", str(issue)) == f"{target}: {message}"


def test_suggestions_include_plugin_names(code: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean width_of_nothing"):
        config.load([f"plugins=[{MODULE}]", "model=width_of_nothin"])


def test_unregistered_loss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonlaunch.config.options.losses.LOSSES._entries", {})
    with pytest.raises(ConfigError, match="no loss is registered; register yours"):
        config.load(["train.loss=mine"])
