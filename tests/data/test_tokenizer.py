"""Tokenizers: bytes, or the files of a tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import corpus

from axonlaunch.checkpoint.exchange.weights import TRAINED_ON, exported_tokenizer
from axonlaunch.config import ConfigError
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data.tokenizers.tokenizer import (
    FOLDER,
    PretrainedTokenizer,
    Tokenizer,
    load_kept,
    load_tokenizer,
)

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def loaded(path: Path | str) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(path=str(path)))


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as raised:
        loaded(path)
    return str(raised.value)


def test_folder_and_single_file_are_read(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes((folder / "tokenizer.json").read_bytes())
    text = "def größe(): pass"
    tokens = loaded(folder).encode(text)
    assert loaded(folder / "tokenizer.json").encode(text) == tokens
    assert loaded(alone).encode(text) == tokens
    assert loaded(folder).decode(tokens) == text
    # The token that ends a text is defined in the other file.
    assert loaded(folder).documents([text])[0].tolist() == [*tokens, 0]
    assert loaded(alone).documents([text])[0].tolist() == tokens


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers makes an empty tokenizer from such a folder, and every row would be empty."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert refusal(tmp_path) == (
        f"tokenizer.path={tmp_path}: its tokenizer has only special tokens; add its tokenizer.json"
    )


def test_a_tokenizer_that_cuts_or_pads_by_itself_does_not(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    texts = ["a much longer text than three tokens", "a"]
    expected = [tokens.tolist()[:-1] for tokens in loaded(folder).documents(texts)]
    assert [tokens.tolist() for tokens in loaded(tmp_path).documents(texts)] == expected


def test_special_and_out_of_vocabulary_tokens_decode_to_no_text(folder: Path) -> None:
    tokenizer = loaded(folder)
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([*tokenizer.encode("text"), 0, 1, 600]) == "text"
    assert load_tokenizer(TokenizerConfig()).decode([104, 105, 300]) == "hi"


def test_the_files_that_are_kept_are_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    tokenizer = loaded(folder)
    tokenizer.keep(tmp_path / FOLDER)
    reloaded = load_kept(tmp_path)
    assert reloaded is not None
    assert reloaded.fingerprint == tokenizer.fingerprint
    assert load_kept(tmp_path / "elsewhere") is None
    other = corpus.save_tokenizer(tmp_path / "other", chat_template="{{ messages }}")
    assert loaded(other).fingerprint == tokenizer.fingerprint
    assert loaded(other).template_fingerprint != tokenizer.template_fingerprint
    with (other / "tokenizer.json").open("a") as stream:
        stream.write(" ")
    assert loaded(other).fingerprint != tokenizer.fingerprint


def test_saved_tokenizer_has_configured_class(folder: Path, tmp_path: Path) -> None:
    """Like the published gpt2, whose tokenizer class follows from ``model_type`` in
    ``config.json``.
    """
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8}))
    read, plain = loaded(source), loaded(source / "tokenizer.json")
    assert isinstance(read, PretrainedTokenizer)
    assert read.transformers.eos_token == "<|endoftext|>"
    read.keep(tmp_path / FOLDER)
    kept = load_kept(tmp_path)
    assert kept is not None
    assert type(kept.transformers) is type(read.transformers)
    assert (kept.end, kept.fingerprint) == (read.end, plain.fingerprint)


def test_exported_tokenizer_does_not_get_the_class_of_the_weights(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for tokenizer, end in (({"model_type": "gpt2"}, "<|endoftext|>"), ({}, None)):
        content = {"model_type": "llama", TRAINED_ON: {"tokenizer": tokenizer}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        read = exported_tokenizer(tmp_path)
        assert read is not None
        assert read.transformers.eos_token == end


def test_a_tokenizer_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    old_fingerprint = loaded(corpus.save_tokenizer(tmp_path)).template_fingerprint
    corpus.save_tokenizer(tmp_path, chat_template="{{ messages }}")
    assert loaded(tmp_path).template_fingerprint != old_fingerprint


def test_changed_additional_chat_template_changes_only_the_template_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    model = copied(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    templates = model / "additional_chat_templates"
    templates.mkdir()
    fingerprints = []
    for text in ("{{ tools }}", "{{ messages }} {{ tools }}"):
        (templates / "tool_use.jinja").write_text(text)
        tokenizer = loaded(model)
        assert isinstance(tokenizer, PretrainedTokenizer)
        assert tokenizer.transformers.get_chat_template(tools=[{}]) == text
        fingerprints.append((tokenizer.fingerprint, tokenizer.template_fingerprint))
    (old_fingerprint, template_before), (after, template_after) = fingerprints
    assert old_fingerprint == after == loaded(folder).fingerprint
    assert template_before != template_after


def test_run_keeps_additional_chat_templates(folder: Path, tmp_path: Path) -> None:
    model = copied(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    tokenizer = loaded(model)
    tokenizer.keep(tmp_path / FOLDER)
    kept = load_kept(tmp_path)
    assert isinstance(tokenizer, PretrainedTokenizer)
    assert kept is not None
    assert kept.transformers.get_chat_template(tools=[{}]) == "{{ tools }}"
    assert kept.template_fingerprint == tokenizer.template_fingerprint


def test_invalid_tokenizer_is_refused_with_path(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").endswith(
        "has no tokenizer.json or other file of a tokenizer; give a folder that has, or null"
    )
    (tmp_path / "vocab.txt").write_text("")
    assert "is a file; give its folder" in refusal(tmp_path / "vocab.txt")
    assert "there is no such folder, seen from " in refusal("nobody/nothing-here")
    content = (folder / "tokenizer.json").read_text()
    (tmp_path / "empty" / "tokenizer.json").write_text(content[: len(content) // 2])
    assert refusal(tmp_path / "empty").startswith(
        f"tokenizer.path={tmp_path}/empty: can't be read: "
    )


def test_code_that_comes_with_a_tokenizer_does_not_run(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    content |= {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import *\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    try:
        loaded(tmp_path)
    except ConfigError as error:
        assert "can't be read" in str(error)  # noqa: PT017 - it may also be read without that code
    assert not (tmp_path / "ran").exists()


def test_a_kept_tokenizer_that_is_a_link_is_not_read(folder: Path, tmp_path: Path) -> None:
    loaded(folder).keep(tmp_path / FOLDER)
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (tmp_path / FOLDER / "tokenizer_config.json").unlink()
    (tmp_path / FOLDER / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: can't be read: is not a reg"):
        load_kept(tmp_path)


def copied(folder: Path, to: Path) -> Path:
    """Copy a tokenizer's folder, as an untrusted user may have prepared it."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


READ_BY_TRANSFORMERS = ["config.json", "source.spm", "additional_chat_templates/tool.jinja"]
"""Files that are read, but not kept in a run's folder."""


@pytest.mark.parametrize("prepared", ["link", "dangling link", "fifo", "device"])
@pytest.mark.parametrize(
    "name", ["vocab.x", "chat_template.bak", "my.model", "tokenizer.json", *READ_BY_TRANSFORMERS]
)
def test_a_link_that_leaves_a_tokenizers_folder_is_refused(
    name: str, prepared: str, folder: Path, tmp_path: Path
) -> None:
    secret, file = tmp_path / "secret", copied(folder, tmp_path / "model") / name
    secret.write_text("{}")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    targets = {"link": "../" * (1 + name.count("/")) + "secret", "device": "/dev/zero"}
    if prepared == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(targets.get(prepared, "/nowhere"))
    message = refusal(tmp_path / "model")
    assert message.startswith(f"tokenizer.path={tmp_path}/model: {file}: can't be read: is not a ")
    assert ("replace it with a copy of the file" in message) is (prepared != "fifo")


def test_a_folder_of_chat_templates_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    model, outside = copied(folder, tmp_path / "model"), tmp_path / "outside"
    outside.mkdir()
    (outside / "tool.jinja").write_text("secret")
    (model / "additional_chat_templates").symlink_to(outside)
    assert refusal(model).endswith("tool.jinja: can't be read: is in a folder that is a link")


def test_links_inside_a_tokenizers_folder_and_to_the_hubs_blobs_are_read(
    folder: Path, tmp_path: Path
) -> None:
    expected = loaded(folder)
    model = copied(folder, tmp_path / "model")
    (model / "tokenizer.json").rename(model / "the.json")
    (model / "tokenizer.json").symlink_to("the.json")
    assert loaded(model).fingerprint == expected.fingerprint
    snapshot, blobs = tmp_path / "repo/snapshots/main", tmp_path / "repo/blobs"
    templates = copied(folder, snapshot) / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ messages }}")
    blobs.mkdir()
    for number, file in enumerate([*snapshot.glob("*.json"), *templates.iterdir()]):
        digest = f"{number:040x}"
        file.rename(blobs / digest)
        depth = len(file.relative_to(tmp_path / "repo").parts) - 1
        file.symlink_to("../" * depth + f"blobs/{digest}")
    assert loaded(snapshot).fingerprint == expected.fingerprint
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    assert "replace it with a copy of the file" in refusal(snapshot)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.x", "config.json"])
def test_a_tokenizers_file_that_is_too_large_is_refused_unread(
    name: str, folder: Path, tmp_path: Path
) -> None:
    with (copied(folder, tmp_path) / name).open(
        "r+b" if name == "tokenizer.json" else "wb"
    ) as file:
        file.truncate(5 << 30)
    assert refusal(tmp_path).endswith(f"{name}: can't be read: is larger than 268435456 bytes")


def test_a_kept_tokenizer_has_the_permissions_of_the_models_files(
    folder: Path, tmp_path: Path
) -> None:
    model, kept = copied(folder, tmp_path / "model"), tmp_path / FOLDER
    (model / "tokenizer.json").chmod(0o600)
    (model / "tokenizer_config.json").chmod(0o644)
    kept.mkdir()
    (tmp_path / "victim").write_text("as it was")
    (kept / "tokenizer.json").symlink_to(tmp_path / "victim")
    loaded(model).keep(kept)
    assert {file.name: file.stat().st_mode & 0o777 for file in kept.iterdir()} == {
        "tokenizer.json": 0o600,
        "tokenizer_config.json": 0o644,
    }
    assert (tmp_path / "victim").read_text() == "as it was"
