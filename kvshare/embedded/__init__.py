"""The embedded engine: torch and transformers in the proxy's own process, on CPU or one GPU."""
