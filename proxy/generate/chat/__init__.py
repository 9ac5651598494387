"""POST /v1/chat/completions and /v1/completions: their bodies, and their answers."""
