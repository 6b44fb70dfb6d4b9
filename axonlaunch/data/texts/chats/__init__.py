"""Chats: from the rows of files to tokens, and which tokens count."""
