"""Chats in the form that templates take, whichever API they came by, and tool calls in a model's answer."""
