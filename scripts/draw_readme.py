"""
Draws the README's two charts, which draw_readme.yaml describes, from docs/measured/ into docs/images/.

    .venv/bin/python scripts/draw_readme.py
"""

import json
from pathlib import Path
from typing import Any

import yaml
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
CHARTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
PANELS, SPEEDUPS, WORKLOADS, POLICIES = (
    CHARTS[part] for part in ("panels", "speedups", "workloads", "policies")
)


def document(name: str) -> dict[str, Any]:
    """One document of docs/measured."""
    return dict(json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8")))


def draw_speedups(axes: Axes, name: str) -> None:
    """Speedups over a full prefill as bars, and their bound as a line."""
    figures = document(name)
    for key, (label, colour) in SPEEDUPS.items():
        if key in figures:
            axes.bar_label(axes.barh(label, figures[key], color=colour), fmt="%.1fx", padding=4)
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


def main() -> None:
    rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    speedups = Figure(figsize=(9, 2.4), dpi=160, layout="constrained")
    for axes, name in zip(speedups.subplots(1, len(PANELS)), PANELS, strict=True):
        draw_speedups(axes, name)
    speedups.savefig(DOCS / "images" / "speedups.png")
    reuse = Figure(figsize=(9, 2.8), dpi=160, layout="constrained")
    draw_reuse(reuse.subplots())
    reuse.savefig(DOCS / "images" / "reuse.png")


if __name__ == "__main__":
    main()
