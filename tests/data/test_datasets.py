import builtins
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from axonlaunch.config.options.data import (
    DigitsConfig,
    PythonSourceConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    TextConfig,
    TokensConfig,
)
from axonlaunch.config.options.documents import DocumentsConfig
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.data import DATASETS, build_dataset


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.txt").write_bytes(b"deep" * 100)
    return tmp_path


@pytest.fixture
def token_file(tmp_path):
    def write(tokens, dtype="uint16", name="tokens.bin"):
        path = tmp_path / name
        np.asarray(tokens, dtype=dtype).tofile(path)
        return str(path)

    return write


def error_of(config):
    with pytest.raises(ConfigError) as error:
        build_dataset(config)
    return str(error.value)


# Python's source


def test_python_source_holds_out_complete_files():
    dataset = build_dataset(PythonSourceConfig(sequence_length=64))
    total = (dataset.num_samples + dataset.num_eval_samples) * 64
    assert total > 4_000_000
    assert 0.01 < dataset.num_eval_samples * 64 / total < 0.1
    text = dataset.decode(dataset.samples(range(500), split="train").inputs.flatten().tolist())
    assert "import" in text
    assert "def " in text


def test_a_model_of_single_bytes_costs_over_three_nats_on_python_source():
    assert 3.0 < build_dataset(PythonSourceConfig()).info.unigram_entropy() < 3.6


def test_python_source_is_read_once_a_process():
    short, other = (
        build_dataset(PythonSourceConfig()),
        build_dataset(PythonSourceConfig(sequence_length=7)),
    )
    assert short._rows["train"] is other._rows["train"]


def test_the_held_out_files_follow_from_their_names_on_every_machine():
    from axonlaunch.data.included.python_source import _share

    assert _share("json/decoder.py") == pytest.approx(0.4508014742921951)


def test_a_python_without_source_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert error_of(PythonSourceConfig()) == (
        f"data.name=python_source: this Python has no source files under {tmp_path} (it may be "
        "frozen or zipped); use data=text with your files"
    )


def test_a_share_that_leaves_one_side_empty_is_reported(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("x = 1\n" * 100)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert error_of(PythonSourceConfig(eval_fraction=0.07)) == (
        "data.eval_fraction=0.07: all 1 files are in one split; use a value closer to 0.05"
    )


def test_tests_and_installed_packages_are_no_part_of_python_source(tmp_path, monkeypatch):
    from axonlaunch.data.included.python_source import _source_files

    for folder in ("json", "test", "site-packages/torch", "json/tests", "idlelib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").touch()
    (tmp_path / "b.py").touch()
    (tmp_path / "c.txt").touch()
    assert _source_files(tmp_path) == ["b.py", "json/a.py"]


# A user's text


def test_text_is_the_files_in_order_and_the_last_bytes_are_held_out(corpus):
    dataset = build_dataset(TextConfig(files=["*.txt"], sequence_length=10, eval_fraction=0.25))
    content = b"a.txt" * 100 + b"\n" + b"b.txt" * 100
    assert dataset.num_samples == (751 - 1) // 10
    assert dataset.num_eval_samples == (250 - 1) // 10
    batch = dataset.samples([0, 3], split="train")
    assert bytes(batch.inputs[1].tolist()) == content[30:40]
    assert bytes(batch.targets[1].tolist()) == content[31:41]
    held_out = dataset.samples([0], split="eval")
    assert bytes(held_out.inputs[0].tolist()) == content[751:761]


def test_globs_cross_folders_and_a_file_named_twice_is_read_once(corpus):
    first = build_dataset(TextConfig(files=["**/*.txt"], sequence_length=4, eval_fraction=0.3))
    two = build_dataset(
        TextConfig(files=["**/*.txt", "a.txt"], sequence_length=4, eval_fraction=0.3)
    )
    assert first.num_samples == two.num_samples
    assert first.num_samples + first.num_eval_samples >= 1400 // 4 - 2


def test_path_with_brackets_is_not_a_glob(corpus):
    (corpus / "x[1].txt").write_bytes(b"bracket" * 100)
    assert build_dataset(TextConfig(files=["x[1].txt"], sequence_length=4)).num_samples > 100


def test_bytes_come_back_as_text(corpus):
    dataset = build_dataset(TextConfig(files=["a.txt"], sequence_length=4))
    assert dataset.decode(dataset.encode("naïve ✓")) == "naïve ✓"
    assert dataset.decode([0xFF, 65]) == "\ufffdA"
    assert dataset.decode([300, 65]) == "A"  # from a model with more tokens than bytes


def test_unigram_entropy_equals_best_constant_guess(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"ab" * 100_000)
    entropy = build_dataset(TextConfig(files=[str(path)], sequence_length=4)).info.unigram_entropy()
    assert entropy == pytest.approx(np.log(2), abs=0.002)


def test_patterns_that_name_no_file_are_reported_all_at_once(corpus):
    assert error_of(TextConfig(files=["no.txt", "a.txt", "*.rst", "deep"])) == (
        f"data.files=no.txt: no file matches, seen from {corpus}\n"
        f"data.files=*.rst: no file matches, seen from {corpus}\n"
        "data.files=deep: it is a folder; write deep/**/*.txt for the files in it"
    )


def test_no_pattern_at_all_is_reported():
    assert error_of(TextConfig(files=[])) == (
        "data.files=[]: names no file; write data.files=[notes.txt,'corpus/**/*.md']"
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "x"}\n', "holds records, whose markup .*; .* jq -r .text FILE > "),
        ("a.csv", b"text,label\nx,1\n", "holds records, whose markup .* to a .txt file$"),
        ("a.parquet", b"PAR1\0", "holds records, whose markup .* to a .txt file$"),
        ("a.txt.gz", b"\x1f\x8b", "is compressed, .* gunzip -k FILE$"),
        ("a.jsonl.ZST", b"\x28\xb5", "is compressed, .* unzstd FILE$"),
        ("a.bin", b"\1\0\2\0", "is not text; .* data=tokens data.path=FILE$"),
        ("a.txt", b"\1\0\2\0", "is not text, it has NUL bytes; .* data=tokens data.path=FILE; "),
        ("a.txt", "text".encode("utf-16"), ".* NUL bytes; .* iconv -f UTF-16 -t UTF-8$"),
        ("a", "déjà vu, été".encode("latin-1") * 9, "is not text in UTF-8, .* iconv -f LATIN1"),
    ],
)
def test_binary_text_file_is_refused_with_remedy(
    name: str, content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content * 100)
    with pytest.raises(ConfigError, match=rf"^data.files=\[{name}\]: {name} {reason}"):
        build_dataset(TextConfig(files=[name], sequence_length=4))


def test_files_that_are_refused_alike_are_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.gz", "e.txt"):
        (tmp_path / name).write_bytes(b"\0 is not looked for where names say enough")
    with pytest.raises(ConfigError) as refused:
        build_dataset(TextConfig(files=["*"], sequence_length=4))
    records, compressed = refused.value.problems
    assert records.message.startswith("a.jsonl (and 2 more) holds records")
    assert compressed.message.startswith("d.gz is compressed")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.html", "README", "a.log"])
def test_documents_and_sources_are_text_even_with_a_stray_byte(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(("prix: 3 € für süß\n" * 40).encode() + b"\xff")
    assert (
        build_dataset(TextConfig(files=[str(tmp_path / name)], sequence_length=4)).num_samples > 100
    )


def test_a_long_files_first_mebibyte_may_end_inside_of_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(("x" + "€" * 2**19).encode())
    assert build_dataset(TextConfig(files=[str(tmp_path / "a.txt")])).num_samples > 100


def test_a_file_shorter_than_a_sample_is_reported(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100)
    assert error_of(TextConfig(files=[str(path)], sequence_length=200)) == (
        "data.sequence_length=200: the training part has 95 tokens, and a sample takes 201 (its "
        "targets are one ahead); give more data, or use 4 or less"
    )
    assert error_of(TextConfig(files=[str(path)], sequence_length=50)) == (
        "data.sequence_length=50: the held-out part has 5 tokens, and a sample takes 51 (its "
        "targets are one ahead); give more data, or use 4 or less"
    )
    path.write_bytes(b"")
    assert error_of(TextConfig(files=[str(path)], sequence_length=50)).endswith("give more data")


# Token files


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_read_with_their_dtype(token_file, dtype):
    tokens = np.arange(1000) * (60 if dtype == "uint16" else 70_000)
    path = token_file(tokens, dtype)
    dataset = build_dataset(
        TokensConfig(path=path, dtype=dtype, sequence_length=8, eval_fraction=0.1)
    )
    batch = dataset.samples([2], split="train")
    assert batch.inputs.dtype == torch.int64
    assert batch.inputs[0].tolist() == tokens[16:24].tolist()
    assert batch.targets[0].tolist() == tokens[17:25].tolist()
    assert dataset.samples([0], split="eval").inputs[0].tolist() == tokens[900:908].tolist()
    assert dataset.num_classes == dataset.vocab_size == tokens.max() + 1


def test_held_out_tokens_may_have_a_file_of_their_own(token_file):
    path = token_file(np.arange(100))
    held_out = token_file(np.arange(500, 600), name="eval.bin")
    dataset = build_dataset(TokensConfig(path=path, eval_path=held_out, sequence_length=9))
    assert (dataset.num_samples, dataset.num_eval_samples) == (11, 11)
    assert dataset.samples([0], split="eval").inputs[0, 0] == 500
    assert dataset.num_classes == 600


def test_a_given_vocabulary_is_taken_and_the_file_is_not_read_through(token_file):
    config = TokensConfig(path=token_file([5] * 100), sequence_length=4, vocab_size=50257)
    assert (
        build_dataset(TokensConfig(**{**vars(config), "eval_fraction": 0.2})).num_classes == 50257
    )


def test_token_files_that_can_not_be_are_reported(token_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of(TokensConfig(path="no.bin")) == (
        f"data.path=no.bin: no such file, seen from {tmp_path}"
    )
    (tmp_path / "odd.bin").write_bytes(b"abc")
    assert error_of(TokensConfig(path="odd.bin")) == (
        "data.path=odd.bin: its 3 bytes are not a whole number of uint16 tokens of 2 bytes; "
        "check the file, or set data.dtype to the type it was written in"
    )
    token_file(np.arange(100))
    assert "data.eval_path=no.bin: no such file" in error_of(
        TokensConfig(path="tokens.bin", eval_path="no.bin")
    )
    assert "the training part has 99 tokens" in error_of(TokensConfig(path="tokens.bin"))


def test_tokens_know_no_text(token_file):
    dataset = build_dataset(
        TokensConfig(path=token_file(range(100)), sequence_length=4, eval_fraction=0.2)
    )
    assert not dataset.is_text
    with pytest.raises(NotImplementedError, match="TokenFile knows no text"):
        dataset.encode("text")


# Synthetic and real images


def test_synthetic_tokens_count_up_and_differ_between_training_and_evaluation():
    dataset = build_dataset(SyntheticTokensConfig(vocab_size=11, sequence_length=6))
    batch = dataset.samples(range(100), split="train")
    rows = torch.cat((batch.inputs, batch.targets[:, -1:]), 1)
    strides = (rows[:, 1:] - rows[:, :-1]) % 11
    assert (strides == strides[:, :1]).all()
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    again = dataset.samples([41], split="train")
    assert torch.equal(again.inputs[0], batch.inputs[41])
    assert not torch.equal(dataset.samples(range(100), split="eval").inputs, batch.inputs)


def test_synthetic_images_can_be_distinguished():
    dataset = build_dataset(SyntheticImagesConfig(image_size=8, num_channels=3))
    train = dataset.samples(range(2000), split="train")
    assert train.inputs.shape == (2000, 3, 8, 8)
    assert train.inputs.dtype == torch.float32
    assert set(train.targets.tolist()) == set(range(10))
    means = torch.stack([train.inputs[train.targets == c].mean(0) for c in range(10)])
    held_out = dataset.samples(range(200), split="eval")
    distances = torch.cdist(held_out.inputs.flatten(1), means.flatten(1))
    assert (distances.argmin(1) == held_out.targets).float().mean() > 0.99


def test_digits_are_real_and_each_is_on_one_side():
    pytest.importorskip("sklearn")
    dataset = build_dataset(DigitsConfig())
    assert dataset.num_samples + dataset.num_eval_samples == 1797
    train = dataset.samples(range(dataset.num_samples), split="train")
    held_out = dataset.samples(range(dataset.num_eval_samples), split="eval")
    assert train.inputs.shape[1:] == (1, 28, 28)
    assert train.inputs.min() >= 0
    assert train.inputs.max() <= 1
    distances = torch.cdist(held_out.inputs.flatten(1), train.inputs.flatten(1))
    assert (train.targets[distances.argmin(1)] == held_out.targets).float().mean() > 0.95


def test_digits_keep_their_native_size():
    pytest.importorskip("sklearn")
    images = (
        build_dataset(DigitsConfig(image_size=8)).samples(range(100), split="train").inputs * 16
    )
    assert torch.equal(images, images.round())


def test_digits_without_scikit_learn_name_package_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert error_of(DigitsConfig()) == (
        "data.name=digits: needs scikit-learn; pip install 'axonlaunch[digits]'"
    )


# All of them


def test_each_dataset_reports_shapes_that_model_must_fit(token_file, tmp_path):
    pytest.importorskip("sklearn")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "several of these make a row"}\n' * 100)
    configs = {
        "python_source": PythonSourceConfig(),
        "text": TextConfig(files=[__file__], sequence_length=32),
        "documents": DocumentsConfig(files=[str(rows)], sequence_length=16, held_out=0.1),
        "tokens": TokensConfig(path=token_file(range(5000)), sequence_length=16),
        "synthetic_tokens": SyntheticTokensConfig(),
        "synthetic_images": SyntheticImagesConfig(),
        "digits": DigitsConfig(),
    }
    assert {*configs, "chat", "custom"} == {*DATASETS.names()}
    for name, config in configs.items():
        dataset = build_dataset(config)
        assert dataset.is_text == DATASETS.facts(name).is_text
        for split in ("train", "eval"):
            batch = dataset.samples([0, 1], split=split)
            assert batch.inputs.shape == (2, *dataset.sample_shape)
            assert batch.targets.dtype == torch.int64
            assert batch.targets.max() < dataset.num_classes
            if dataset.kind == "tokens":
                assert batch.targets.shape == batch.inputs.shape
                assert batch.inputs.max() < dataset.num_classes
            else:
                assert batch.targets.shape == (2,)


def test_making_a_dataset_imports_no_torch():
    script = (
        "import sys; from axonlaunch.data import DATASETS, build_dataset;"
        "from axonlaunch.config.options.data import PythonSourceConfig as P;"
        "build_dataset(P()).info.unigram_entropy(); DATASETS.summaries();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
