"""
Benchmarks behind `kvshare bench NAME --json`: one module each, with `run(**options) -> dict`.

Arms are measured side by side in one process, alternating, and reported as ratios of medians.
"""
