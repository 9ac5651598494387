"""Keys and values as tensors: segments, the buffer of one sequence, rotation, partial attention, tiers."""
