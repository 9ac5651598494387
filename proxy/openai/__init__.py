"""The /v1 routes of an engine in this process: bodies are read, answers are written here."""

from proxy.openai.routes import add_routes

__all__ = ["add_routes"]
