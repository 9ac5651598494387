"""The OpenAI-shaped HTTP front of KVShare. Knows requests, keys and streams; knows no KV."""
