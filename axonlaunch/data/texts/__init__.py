"""Text datasets: documents, chats and mixes, tokenised into rows."""
