"""
The lab's commands, which `kvshare` finds by the entry points of kvshare-lab (lab/pyproject.toml).

    bench.py              `kvshare bench NAME`: runs a benchmark and shows its result
    benchmarks.py         the benchmarks that run in this process alone
    served_benchmarks.py  those that start real vLLM servers
    benchmark.py          how a benchmark and its options are declared
    options.py            the options that several of them have
    view.py               how a result looks on a terminal
    calibrate.py          `kvshare calibrate`
"""
