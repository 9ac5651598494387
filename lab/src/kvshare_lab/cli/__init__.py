"""
The lab's commands, which `kvshare` finds by the entry points of kvshare-lab (lab/pyproject.toml).

    bench.py      `kvshare bench NAME`; bench.toml has the options of each benchmark
    calibrate.py  `kvshare calibrate`; its options are in calibrate.toml
"""
