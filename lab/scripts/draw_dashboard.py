"""
Draws the pictures of docs/dashboard.md again: three teams use a server with the bundled model for a made-up
hour, and Chromium opens the views.

    PYTHONPATH=. .venv/bin/python lab/scripts/draw_dashboard.py
"""

import asyncio
import base64
import hashlib
import io
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from PIL import Image

from kvshare.embedded.engine import EmbeddedEngine
from kvshare.settings import load_settings
from proxy.app import build_app
from proxy.connection import FrontRunner
from proxy.context import SERVER
from tests.browser import Tab, browsing

IMAGES = Path(__file__).parents[2] / "docs" / "images"
TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_KEYS = {
    "shop-chat": ("shop", "infer"),
    "shop-mail": ("shop", "infer"),
    "leases": ("legal", "infer"),
    "papers": ("research", "infer"),
    "operator": ("operators", "admin"),
}
_LIMITS = [
    {"name": "shop", "requests_per_minute": 6000, "max_kv_bytes": "30MB"},
    {"name": "legal", "max_kv_bytes": "15MB"},
    {"name": "research", "max_kv_bytes": "15MB", "max_mode": "exact"},
]
_SETTINGS: dict[str, Any] = {
    "server.port": 0,
    "model.path": "demo",
    "model.dtype": "float32",
    "store.kv_bytes": 60_000_000,
    "control.shadow_share": 0.5,
    "control.unshared_share": 0.0,
    "index.search_timeout_s": 10.0,  # other work on the machine is no part of the pictures
    "index.embed_timeout_s": 10.0,
    "auth.tenants": _LIMITS,
    "auth.keys": [
        {"name": name, "tenant": tenant, "role": role, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name, (tenant, role) in _KEYS.items()
    ],
}
_SHOWN = {"system": TEXTS["shop"].format(day="Sunday", name="Greta Holm"), "user": "May I return a helmet?"}


def _requests(rng: random.Random, number: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield names of keys, and the messages that they send."""
    for _ in range(number):
        key = rng.choices(("shop-chat", "shop-mail", "leases", "papers"), (6, 3, 3, 2))[0]
        name, question = rng.choice(TEXTS["names"]), rng.choice(TEXTS["questions"])
        match key:
            case "leases":
                system = TEXTS["lease"].format(name=name, rent=rng.randrange(700, 1500, 50))
            case "papers":
                system = TEXTS["papers"] * rng.choice((1, 2))
            case _:
                system = TEXTS["shop"].format(day=rng.choice(TEXTS["days"]), name=name)
        if rng.random() < 0.06:  # nothing in common with the others
            system = f"{name} asks."
        yield key, [{"role": "system", "content": system}, {"role": "user", "content": question}]


@asynccontextmanager
async def _running(folder: Path) -> AsyncIterator[tuple[str, web.Application]]:
    settings = load_settings(overrides={**_SETTINGS, "store.path": str(folder)})
    app = build_app(settings, EmbeddedEngine(settings))
    runner = FrontRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await app[SERVER].lifecycle.wait_started()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", app
    finally:
        await runner.cleanup()


async def _use(url: str, app: web.Application, number: int) -> str:
    """Send requests as if they came within an hour. Returns the id of one that copies."""
    activity, rng, began = app[SERVER].activity, random.Random(5), time.time() - 3600
    shown = ""
    async with aiohttp.ClientSession() as http:
        for place, (key, messages) in enumerate(_requests(rng, number)):
            activity._clock = partial(float, began + 3600 * (place + 1) / number)
            body = {"model": app[SERVER].engine.card.model_id, "messages": messages, "max_tokens": 6}
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                await response.read()
                assert response.status == 200, await response.text()
            if place % 8 == 0:
                await app[SERVER].engine.settle()  # type: ignore[attr-defined]  # of the embedded one
            if response.headers.get("X-KVShare-Decision") == "approx" and key == "leases":
                shown = response.headers["X-KVShare-Request"]
        await app[SERVER].engine.settle()  # type: ignore[attr-defined]
    activity._clock = time.time
    return shown


async def _draw(tab: Tab, name: str, *, width: int = 1200, most: int = 1500) -> None:
    """Write a picture of what the tab shows, to the end of the page."""
    height = min(most, await tab.run("document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    drawn = await tab.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    picture = Image.open(io.BytesIO(base64.b64decode(drawn["data"]))).convert("RGB")
    picture.quantize(192, dither=Image.Dither.NONE).save(IMAGES / f"dashboard-{name}.png", optimize=True)


async def _show(tab: Tab, view: str) -> None:
    await tab.run(f"document.querySelector('#main').replaceChildren(); location.hash = '#{view}'")
    await tab.run("window.dispatchEvent(new Event('hashchange'))")
    await tab.until("Boolean(document.querySelector('main h1'))")
    await tab.run("document.activeElement.blur()")
    await asyncio.sleep(0.3)


async def _draw_all(tab: Tab, url: str, shown: str) -> None:
    await tab.look(width=1200, height=800)
    await tab.open(f"{url}/admin/ui")
    await tab.type("#key", "operator")
    await tab.press("Enter")
    await tab.until("document.title.startsWith('Overview')")
    for view in ("overview", "live", "tree", "memory", "fidelity"):
        await _show(tab, view)
        await _draw(tab, view)
    await _show(tab, f"why/{shown}")
    await _draw(tab, "request")
    await _show(tab, "why")
    body = {"messages": [{"role": role, "content": text} for role, text in _SHOWN.items()]}
    await tab.run(f"document.querySelector('#text').value = {json.dumps(json.dumps(body))}")
    for name, value in (("form", "body"), ("whose", "tenant=shop")):
        field = f"document.querySelector('#{name}')"
        await tab.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('change'))")
    await tab.click("Explain")
    await tab.until("document.querySelector('.verdict')")
    await _draw(tab, "why")
    await tab.look(width=1200, height=800, dark=True)
    await _show(tab, "overview")
    await _draw(tab, "dark")
    await tab.look(width=400, height=800)
    await _show(tab, "live")
    await _draw(tab, "phone", width=400, most=900)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with _running(Path(folder) / "store") as (url, app):
            shown = await _use(url, app, 150)
            async with browsing(Path(folder) / "browser") as tab:
                await _draw_all(tab, url, shown)


if __name__ == "__main__":
    asyncio.run(main())
