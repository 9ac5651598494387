"""
Keys and values as tensors: segments, the buffer of one sequence, rotation, editing, partial attention,
tiers.
"""
