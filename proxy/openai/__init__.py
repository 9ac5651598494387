"""The /v1 routes of the embedded engine: bodies are read, answers are written here."""
