"""The tables and figures of published papers on KV reuse, measured again with any model."""
