"""Facts about a text dataset that are known without tokenizing its files."""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data.datasets.dataset import DatasetInfo, Kind
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.texts.encoders import make_encoder
from axonlaunch.data.texts.learned_tokenizer import load_or_learn


@dataclass(frozen=True)
class Untokenized:
    """Facts about a text dataset that are known before its files are read.

    Attributes:
        num_classes: Number of tokens in the vocabulary.
        sample_shape: Shape of a row.
        info: Optional facts.
    """

    num_classes: int
    sample_shape: tuple[int, ...]
    info: DatasetInfo
    kind: Kind = "tokens"


def find_untokenized(config: TextRowsConfig, tokenizer: TokenizerConfig) -> Untokenized:
    """Check everything that needs no tokenizing.

    Raises:
        ConfigError: A pattern matches no file, a file has an unknown format, or the tokenizer can't
            be read or has no chat template for chats.
    """
    if tokenizer.name == "train":
        vocab_size = tokenizer.vocab_size + len(tokenizer.new_tokens())  # or fewer
    else:
        loaded = load_or_learn(tokenizer, config, report=lambda state: None)
        for source in config.sources().values() or [config]:
            make_encoder(source, loaded)
        vocab_size = loaded.vocab_size
    for name, source in (config.sources() or {"": config}).items():
        key = f"data.mix.{name}" if name else "data"
        FileSelection.of_training(source, key=key).check()
        FileSelection.of_held_out(source, key=key).check()
    info = DatasetInfo(is_packed=config.packing != "none")
    return Untokenized(vocab_size, (config.sequence_length,), info)
