"""Text datasets: documents, chats and mixes, tokenized into rows."""
