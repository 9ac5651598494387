"""Colours and layout: light, dark and print for the page; the same classes with fixed colours for PNG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Light and dark. Each at least 3:1 on its background, and told apart by dashes too: see plots.styles.
_COLOURS: Final = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1d242b", "#e8ecf0"),
    "soft": ("#55606b", "#a9b3bd"),
    "grid": ("#e3e7eb", "#2c343c"),
    "axis": ("#8a949e", "#7b8691"),
    "panel": ("#f5f7f9", "#1c2228"),
    "bar": ("#cfe3f3", "#1f4562"),
    "strong": ("#ffffff", "#0c1014"),
    "nothing": ("#767676", "#9aa0a6"),
    "prefix": ("#0067b1", "#5ab4f5"),
    "chunks": ("#b85000", "#ff9a56"),
    "response": ("#a3237f", "#ee85c8"),
    "oracle": ("#1d242b", "#f2f2f2"),
    "kv0": ("#00755e", "#3ddbb0"),
    "kv1": ("#3d7d00", "#9bd84f"),
    "kv2": ("#8a6d00", "#e0c04c"),
    "kv3": ("#5b4fd0", "#a5a5ff"),
    "kv4": ("#007a87", "#5fd7e2"),
    "kv5": ("#7a4a2b", "#d8a27d"),
    "total": ("#7a8794", "#8d99a5"),
    "repaired": ("#c58a00", "#e0b040"),
    "computed": ("#a9444f", "#e0808a"),
    "heat": ("#0067b1", "#5ab4f5"),
    "empty": ("#f0f3f5", "#1c2228"),
}
LIGHT: Final = {name: pair[0] for name, pair in _COLOURS.items()}
_DARK: Final = {name: pair[1] for name, pair in _COLOURS.items()}

_SERIES: Final = tuple(_COLOURS)[tuple(_COLOURS).index("nothing") :]  # what is drawn with data
_FONTS: Final = 'system-ui,"Segoe UI",Roboto,sans-serif'
_DASHES: Final = {"d1": "7 4", "d2": "2 3", "d3": "10 3 2 3"}


def plot_css(colours: Mapping[str, str] | None = None) -> str:
    """Of the SVGs; with `colours` every value is written out, as renderers outside browsers need it."""

    def colour(name: str) -> str:
        return f"var(--{name})" if colours is None else colours[name]

    rules = [
        f".label{{font-size:13px;fill:{colour('ink')}}}",
        f".tick{{font-size:12px;fill:{colour('soft')}}}",
        f".cell{{font-size:11px;fill:{colour('ink')}}}",
        f".cell.strong{{fill:{colour('strong')}}}",
        f".grid{{stroke:{colour('grid')};stroke-width:1}}",
        f".axis{{stroke:{colour('axis')};stroke-width:1}}",
        f".guide{{stroke:{colour('axis')};stroke-width:1;stroke-dasharray:2 4}}",
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}",
        ".faint{opacity:.4}",
    ]
    for name in _SERIES:
        value = colour(name)
        rules.append(f".line.c-{name}{{stroke:{value}}}.dot.c-{name},rect.c-{name}{{fill:{value}}}")
    rules += [f".line.{name}{{stroke-dasharray:{dash}}}" for name, dash in _DASHES.items()]
    return "\n".join(rules)


def _variables(colours: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


def page_css() -> str:
    """Of the whole page; paper is white whatever the screen is."""
    return f"""
:root{{color-scheme:light dark;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 {_FONTS}}}
main{{max-width:1120px;margin:0 auto;padding:28px 20px 80px}}
h1{{font-size:1.75rem;line-height:1.2;margin:0 0 .3em}}
h2{{font-size:1.3rem;margin:2.6em 0 .5em;padding-top:.5em;border-top:1px solid var(--grid)}}
h3{{font-size:1.02rem;margin:1.8em 0 .4em}}
p,li{{max-width:76ch}} .soft,figcaption,caption{{color:var(--soft)}}
.headline{{font-size:1.2rem;font-weight:600;line-height:1.4;margin:1em 0 .6em}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}}
.card{{background:var(--panel);border-radius:8px;padding:12px 14px}}
.card b{{display:block;font-size:1.5rem;line-height:1.25;font-variant-numeric:tabular-nums}}
.card span{{color:var(--soft);font-size:.85rem}}
nav{{font-size:.92rem;margin:1.2em 0}} nav a{{margin-right:1.1em;white-space:nowrap}}
a{{color:var(--prefix)}}
figure{{margin:1.2em 0 1.8em;max-width:960px}} figcaption{{font-size:.92rem;max-width:76ch;margin-top:.4em}}
svg.plot{{width:100%;height:auto;display:block}}
svg text{{font-family:{_FONTS}}}
.scroll{{overflow-x:auto;margin:.8em 0}}
table{{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}}
caption{{text-align:left;padding-bottom:.4em}}
th,td{{padding:5px 8px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}}
thead th{{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom;min-width:3.6em}}
th:first-child{{text-align:left}} tbody th{{font-weight:500}}
tbody tr:hover{{background:var(--panel)}}
.bar{{display:block;min-width:3.8em;padding:0 4px;border-radius:2px;
background:linear-gradient(to right,var(--bar) var(--share),transparent var(--share))}}
pre{{background:var(--panel);padding:14px;border-radius:8px;overflow-x:auto;font-size:.86rem}}
pre.wrap{{white-space:pre-wrap;overflow-wrap:anywhere}}
summary{{cursor:pointer}}
{plot_css()}
@media print{{:root{{color-scheme:light;{_variables(LIGHT)}}} main{{max-width:none;padding:0}}
body{{font-size:10.5pt}} nav{{display:none}} h2,h3{{break-after:avoid}} figure,tr,.card{{break-inside:avoid}}
.scroll{{overflow:visible}} table{{font-size:7pt}} th,td{{padding:2px 4px}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere}}
*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}}}
"""
