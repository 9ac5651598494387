"""The dashboard's files: how they are sent, and what they must not hold."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from proxy.dashboard.routes import STATIC
from tests.proxy.conftest import Server, running_server

MODULES = sorted(STATIC.glob("*.js"))
KINDS = ("exact", "copied", "repaired", "computed")
LEAST_APART = 25.0  # CIE 1976 in Lab; a just noticeable difference is about 2.3
LEAST_CONTRAST = 3.0  # of graphics, by WCAG 2.1
# Machado et al. 2009: what people without one kind of cone see of linear RGB.
CONES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "no middle": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "no short": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}

Colour = tuple[float, float, float]


async def test_the_page_needs_no_key_and_holds_no_data(guarded: Server) -> None:
    """It is sent with a slash at the end, to which the address without one leads."""
    response = await guarded.get("/admin/ui")
    assert (response.status, response.url.path) == (200, "/admin/ui/")
    page = await response.text()
    assert 'data-keys="yes"' in page
    assert "alice" not in page
    for path in STATIC.iterdir():
        assert (await guarded.get(f"/admin/ui/{path.name}")).status == 200
    assert (await guarded.get("/admin/stats")).status == 401


async def test_the_page_knows_where_no_keys_are_asked_for(server: Server) -> None:
    assert 'data-keys="no"' in await (await server.get("/admin/ui/")).text()


@pytest.mark.parametrize(
    "path", ["/admin/ui/", "/admin/ui/app.js", "/admin/ui/style.css", "/admin/ui/icon.svg"]
)
async def test_browsers_may_load_nothing_else(server: Server, path: str) -> None:
    """Nothing from elsewhere, nothing written into the page, and not in a frame of another page."""
    headers = (await server.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert set(policy.values()) == {"'none'", "'self'"}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "name", ["app.py", "..%2froutes.py", "__init__.py", "%2e%2e%2froutes.py", "nothing.js"]
)
async def test_no_other_file_is_sent(server: Server, name: str) -> None:
    assert (await server.get(f"/admin/ui/{name}")).status == 404


async def test_the_dashboard_is_on_the_admin_port() -> None:
    """And then not on the main one."""
    async with running_server(server__admin_port=0) as server:
        assert (await server.get("/admin/ui")).status == 404
    async with running_server(server__admin_port=0, admin=True) as server:
        assert (await server.get("/admin/ui")).status == 200


def test_there_are_modules() -> None:
    """So that the tests below read something; none is too long to hold in mind."""
    assert len(MODULES) > 10
    assert max(path.read_text(encoding="utf-8").count("\n") for path in MODULES) <= 300


@pytest.mark.parametrize(
    "forbidden",
    [
        *(
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ),
        *("localStorage", "indexedDB", "document.cookie", "http:", "https:", "console."),
    ],
)
def test_modules_make_no_html_of_texts_and_keep_nothing(forbidden: str) -> None:
    """The key is in sessionStorage alone. Addresses are relative, but for the name of SVG."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8").replace('"http://www.w3.org/2000/svg"', "")
        assert forbidden not in text, path.name


def test_pages_hold_no_scripts_and_no_styles() -> None:
    """The policy would refuse them."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|style=|\son\w+=|https?:|<script(?! type=\"module\" src=\"app.js\">)", page)


def linear(code: str) -> Colour:
    """A colour of the style sheet in linear RGB."""
    shares = (int(code[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return red, green, blue


def seen(colour: Colour, cones: str) -> Colour:
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, colour, strict=True)))) for row in CONES[cones]
    )
    return red, green, blue


def lab(colour: Colour) -> Colour:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = (
        sum(a * b for a, b in zip(row, colour, strict=True)) / w for row, w in zip(rows, white, strict=True)
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def brightness(code: str) -> float:
    red, green, blue = linear(code)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05


def palettes() -> list[dict[str, str]]:
    """The colours in light and in dark."""
    blocks = re.findall(r":root \{(.*?)\}", (STATIC / "style.css").read_text(encoding="utf-8"), re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]


@pytest.mark.parametrize("cones", CONES)
def test_kinds_of_tokens_are_told_apart_whatever_colours_one_sees(cones: str) -> None:
    """In light and dark, any two of the four."""
    assert len(palettes()) == 2
    for palette in palettes():
        places = {kind: lab(seen(linear(palette[kind]), cones)) for kind in KINDS}
        for one, other in combinations(KINDS, 2):
            apart = sum((a - b) ** 2 for a, b in zip(places[one], places[other], strict=True)) ** 0.5
            assert apart >= LEAST_APART, (one, other)


def test_bars_stand_out_from_their_ground() -> None:
    for palette in palettes():
        for kind in (*KINDS, "accent", "control"):
            pair = sorted(brightness(palette[each]) for each in (kind, "surface"))
            assert pair[1] / pair[0] >= LEAST_CONTRAST, kind
