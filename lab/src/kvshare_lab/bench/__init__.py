"""
Benchmarks behind `kvshare bench NAME --json`: one module each, with `run(**options) -> dict`.
What is returned was measured; the command puts name and options before it.

Arms are measured side by side in one process, alternating, and reported as ratios of medians.
"""
