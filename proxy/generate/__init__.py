"""The /v1 routes of an engine in this process: bodies are read, answers are written here."""
