"""
Draws the charts of README.md and docs/benchmarks.md, which draw_readme.yaml describes, from docs/measured/
into docs/images/. An image's metadata have the figures that it shows, so that a test finds outdated charts.

    .venv/bin/python lab/scripts/draw_readme.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images"
CHARTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
PANELS, SPEEDUPS, WORKLOADS, POLICIES, RATE = (
    CHARTS[part] for part in ("panels", "speedups", "workloads", "policies", "rate")
)


def document(name: str) -> dict[str, Any]:
    """One document of docs/measured."""
    return dict(json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8")))


def draw_speedups(axes: Axes, name: str) -> None:
    """Speedups over a full prefill as bars, and their bound as a line."""
    figures = document(name)
    for key, (label, colour) in SPEEDUPS.items():
        if key in figures:
            bar = axes.barh(label, figures[key], color=colour)
            # Before the bound's line, which may cross it.
            axes.bar_label(
                bar, fmt="%.1fx", padding=5, bbox={"facecolor": "white", "lw": 0, "pad": 1}, zorder=3
            )
    bound = figures["bound"]["speedup"]
    axes.axvline(bound, color="#20262d", linestyle="--")
    axes.annotate(f"bound {bound:.1f}x ", (bound, -0.5), ha="right", va="top")
    axes.set(title=PANELS[name], xlim=(0, 1.12 * bound), ylim=(-0.9, None))
    axes.set_xlabel("times faster to the first token than a full prefill")


def draw_reuse(axes: Axes) -> None:
    """The share of prompt tokens that each policy of a replay reuses, by workload."""
    width = 0.8 / len(POLICIES)
    rates = {
        name: {arm["arm"]: 100 * arm["token_hit_rate"] for arm in document(f"replay/{name}")["arms"]}
        for name in WORKLOADS
    }
    for number, (policy, (label, colour)) in enumerate(POLICIES.items()):
        places = [place + (number - 1.5) * width for place in range(len(WORKLOADS))]
        axes.bar(places, [rates[name][policy] for name in WORKLOADS], width, label=label, color=colour)
    axes.set_xticks(range(len(WORKLOADS)), WORKLOADS)
    axes.set(ylabel="prompt tokens reused, %", ylim=(0, 100))
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)


def draw_rate(axes: Axes) -> None:
    """The median time to the first token of each kind of requests, by their rate."""
    points = document("vllm-load-rate")["open_loop"]
    rates = [point["rate"] for point in points]
    for arm, kind, label, colour, style in RATE:
        medians = [point[arm]["ttft"][kind]["p50_ms"] / 1000 for point in points]
        axes.plot(rates, medians, style, marker="o", label=label, color=colour)
    axes.set(xlabel="requests a second", xticks=rates, ylabel="median time to first token, s", ylim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _rounded(values: ArrayLike) -> list[Any]:
    """To digits that are the same on every machine."""
    return list(np.round(np.asarray(values, float), 6).tolist())


def drawn(figure: Figure) -> str:
    """Title, labels, bars and lines of each of a figure's parts, as JSON."""
    parts = [
        {
            "texts": [axes.get_title(), *axes.get_legend_handles_labels()[1]],
            "bars": [_rounded(bar.get_bbox().bounds) for bar in axes.patches if isinstance(bar, Rectangle)],
            "lines": [_rounded(line.get_xydata()) for line in axes.lines],
        }
        for axes in figure.axes
    ]
    return json.dumps(parts)


def figures() -> dict[str, Figure]:
    """Each chart, by the name of its image."""
    rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    speedups, reuse, rate = (
        Figure(figsize=(width, height), dpi=160, layout="constrained")
        for width, height in ((9, 2.4), (9, 2.8), (7, 2.6))
    )
    for axes, name in zip(speedups.subplots(1, len(PANELS)), PANELS, strict=True):
        draw_speedups(axes, name)
    draw_reuse(reuse.subplots())
    draw_rate(rate.subplots())
    return {"speedups": speedups, "reuse": reuse, "rate": rate}


def main() -> None:
    for name, figure in figures().items():
        figure.savefig(IMAGES / f"{name}.png", metadata={"Description": drawn(figure)})


if __name__ == "__main__":
    main()
