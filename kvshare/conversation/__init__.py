"""Chats as templates take them, whichever API they came by, and what a model's text says: calls of tools."""
