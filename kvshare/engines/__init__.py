"""Engines: what computes the KV and the tokens. `base` is the interface; one folder or file per engine."""
