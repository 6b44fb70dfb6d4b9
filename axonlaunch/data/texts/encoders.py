"""Selects the encoder of rows by the configuration of the data."""

from __future__ import annotations

from axonlaunch.config.options.documents import ChatConfig, DocumentsConfig, TextRowsConfig
from axonlaunch.data.shards.encoding import Encoder
from axonlaunch.data.texts.chats.chat_encoder import ChatEncoder
from axonlaunch.data.texts.chats.prompt_format import PromptEncoder
from axonlaunch.data.texts.documents import DocumentEncoder
from axonlaunch.data.tokenizers.tokenizer import Tokenizer


def make_encoder(config: TextRowsConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder for the rows of a dataset, without reading a file of rows.

    Raises:
        ConfigError: The tokenizer can't encode such rows.
    """
    if isinstance(config, ChatConfig):
        assistant_only = config.train_on == "assistant"
        if config.prompt_format is not None:
            return PromptEncoder(
                tokenizer,
                config.prompt_format,
                fields=config.fields,
                assistant_only=assistant_only,
            )
        return ChatEncoder(
            tokenizer, fields=config.fields, assistant_only=assistant_only, day=config.template_date
        )
    assert isinstance(config, DocumentsConfig)
    return DocumentEncoder(tokenizer, field=config.text_field)
