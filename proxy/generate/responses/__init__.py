"""OpenAI's Responses API: /v1/responses. Nothing is stored: every request brings its whole input."""
