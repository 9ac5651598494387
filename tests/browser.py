"""Chromium, driven over its DevTools protocol: pages are opened, read, and typed into."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_START_S = 120.0
_WAIT_S = 120.0  # machines of CI are busy
_CODES = {"Enter": 13, "Escape": 27, "Tab": 9}


@dataclass
class Tab:
    """One page. `complaints`: what it wrote on its console, errors that it did not catch included."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    _ids: count[int] = field(default_factory=count)
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def listen(self) -> None:
        """Read answers and events until the browser ends."""
        async for message in self.socket:
            document = json.loads(message.data)
            if (answer := self._answers.pop(document.get("id"), None)) is not None:
                answer.set_result(document)
            elif document.get("method") == "Runtime.exceptionThrown":
                details = document["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            elif document.get("method") == "Log.entryAdded":
                self.complaints.append(document["params"]["entry"]["text"])
            elif document.get("method") == "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(document["params"]["args"]))

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        document = await asyncio.wait_for(answer, _WAIT_S)
        assert "error" not in document, document
        result: dict[str, Any] = document["result"]
        return result

    async def run(self, expression: str) -> Any:
        """The value of JavaScript, or of what its promise becomes. An error in it fails the test."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def until(self, expression: str) -> Any:
        """Wait until JavaScript is true, and return its value; of an element that is true."""
        as_value = f"Promise.resolve({expression}).then(it => (it instanceof Node ? true : it))"
        deadline = asyncio.get_running_loop().time() + _WAIT_S
        while not (value := await self.run(as_value)):
            text = await self.run("document.body ? document.body.innerText : ''")
            assert asyncio.get_running_loop().time() < deadline, f"never true: {expression}\n{text[:2000]}"
            await asyncio.sleep(0.05)
        return value

    async def until_complaints(self, number: int) -> None:
        """Wait for so many: some come after the page shows what they are about."""
        async with asyncio.timeout(_WAIT_S):
            while len(self.complaints) < number:
                await self.run("new Promise(done => setTimeout(done, 50))")

    async def text(self) -> str:
        """What the page shows."""
        return str(await self.run("document.body.innerText"))

    async def click(self, text: str) -> None:
        """Click the first button or link with this text, as soon as there is one."""
        quoted = json.dumps(text)
        find = f"[...document.querySelectorAll('button, a')].find(it => it.innerText.trim() === {quoted})"
        await self.until(f"Boolean({find})")
        await self.run(f"{find}.click()")

    async def type(self, selector: str, text: str) -> None:
        await self.until(f"Boolean(document.querySelector({json.dumps(selector)}))")
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """A key of the keyboard, as Tab or Enter."""
        known = {"key": key, "code": key, "windowsVirtualKeyCode": _CODES[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **known, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    async def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and which colours its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Tab]:
    """A new Chromium with an empty page; `profile`: a folder of its own."""
    process = await asyncio.create_subprocess_exec(
        *(str(CHROMIUM), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as http:
            socket = await http.ws_connect(await _address_of_page(http, profile), max_msg_size=0)
            tab = Tab(socket)
            listening = asyncio.create_task(tab.listen())
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await tab.send(f"{domain}.enable")
                yield tab
            finally:
                with suppress(ConnectionError):
                    await tab.send("Browser.close")
                await socket.close()
                await listening
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
        await process.wait()


async def _address_of_page(http: aiohttp.ClientSession, profile: Path) -> str:
    """Where the browser's page is reached. The browser writes its port into its profile."""
    async with asyncio.timeout(_START_S):
        while True:
            with suppress(FileNotFoundError, ValueError, aiohttp.ClientError):
                port = int((profile / "DevToolsActivePort").read_text().split()[0])
                async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
                    pages = [each for each in await response.json() if each["type"] == "page"]
                if pages:
                    return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
