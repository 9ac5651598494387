"""
Real prompts through a real server with the real `openai` client: streaming, several keys at once.

    .venv/bin/python scripts/real_traffic.py FILE.jsonl.gz [FILE ...] --requests 240

Files are JSON lines with `messages` (role, content), gzipped or not. Every user turn of a conversation is a
request with the turns before it as history. The server is started on a free port with four keys of two
tenants, and stopped at the end. Prints one JSON document: requests, errors by code, tokens by source. No
prompt text.
"""

import asyncio
import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any

import openai
import typer
import yaml
from openai.types.chat import ChatCompletionMessageParam

KEYS = {"ada": "north", "ben": "north", "cleo": "south", "dan": "south"}
SOURCES = ("exact", "copied", "recomputed", "repaired")
Messages = list[ChatCompletionMessageParam]


def main(
    files: list[Path],
    *,
    requests: Annotated[int, typer.Option(help="in all, evenly from the files")] = 240,
    max_tokens: int = 16,
    concurrency: Annotated[int, typer.Option(help="requests in flight per key")] = 2,
) -> None:
    """Real prompts through a real server: requests, errors by code, tokens by source, as JSON."""
    share = requests // len(files)
    given = [request for file in files for request in islice(_requests(file), share)]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_config(folder)), encoding="utf-8")
        kvshare = Path(sys.executable).with_name("kvshare")
        command: list[str | Path] = [kvshare, "serve", "--config", config, "--format", "json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                ready = "".join(takewhile(lambda line: line != "}\n", server.stdout))
                if not ready:
                    raise SystemExit(f"the server did not start: exit code {server.wait()}")
                url = json.loads(ready + "}")["url"]
                result = asyncio.run(Traffic(url, max_tokens).send_all(given, concurrency))
                with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
                    result["alive_afterwards"] = response.status == 200
            finally:
                server.terminate()
                result_code = server.wait(timeout=60)
    typer.echo(json.dumps({**result, "server_exit_code": result_code}, indent=1))


def _requests(file: Path) -> Iterator[Messages]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            turns: Messages = [
                {"role": turn["role"], "content": turn["content"]} for turn in json.loads(line)["messages"]
            ]
            for number, turn in enumerate(turns):
                if turn["role"] == "user":
                    yield turns[: number + 1]


def _config(folder: str) -> dict[str, Any]:
    keys = [
        {"name": name, "sha256": hashlib.sha256(_key(name).encode()).hexdigest(), "tenant": tenant}
        for name, tenant in KEYS.items()
    ]
    return {
        "auth": {"keys": keys},
        "model": {"path": "demo"},  # the requests name it, and its 4,096 tokens are part of the figures
        "store": {"path": f"{folder}/store"},
        "server": {"port": 0},
    }


def _key(name: str) -> str:
    return f"kvs-test-{name}"


class Traffic:
    """Sends requests and counts what comes back."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self._url = url
        self._max_tokens = max_tokens
        self._outcomes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()

    async def send_all(self, requests: list[Messages], concurrency: int) -> dict[str, Any]:
        """Each key sends all requests of its share, in order but for `concurrency`, all keys at once."""
        random.Random(0).shuffle(requests)
        began = time.perf_counter()
        shares = (requests[number :: len(KEYS)] for number in range(len(KEYS)))
        await asyncio.gather(*(self._send_share(*key, concurrency) for key in zip(KEYS, shares, strict=True)))
        return {
            "requests": len(requests),
            "outcomes": dict(self._outcomes),
            "tokens": dict(self._tokens),
            "tokens_add_up": sum(self._tokens[source] for source in SOURCES) == self._tokens["prompt"],
            "decisions": dict(self._decisions),
            "keys": len(KEYS),
            "tenants": len(set(KEYS.values())),
            "wall_s": round(time.perf_counter() - began, 1),
        }

    async def _send_share(self, name: str, requests: list[Messages], concurrency: int) -> None:
        slots = asyncio.Semaphore(concurrency)
        base_url = f"{self._url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=_key(name), max_retries=0) as client:

            async def send(messages: Messages) -> None:
                async with slots:
                    self._outcomes[await self._send(client, messages)] += 1

            await asyncio.gather(*map(send, requests))

    async def _send(self, client: openai.AsyncOpenAI, messages: Messages) -> str:
        """What came of a request, in a word."""
        try:
            stream = await client.chat.completions.create(
                model="kvshare-demo",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=self._max_tokens,
                temperature=0,
            )
            usage, finished = None, False
            async for chunk in stream:
                finished |= bool(chunk.choices and chunk.choices[0].finish_reason)
                usage = chunk.usage or usage
        except openai.APIStatusError as exc:
            return f"refused: {exc.code}"
        except openai.APIError as exc:
            return f"failed: {type(exc).__name__}"
        if usage is None or not finished:
            return "failed: stream ended without usage or finish_reason"
        details = (usage.model_extra or {})["kvshare"]
        self._tokens.update({source: details[source] for source in SOURCES})
        self._tokens.update(prompt=usage.prompt_tokens, completion=usage.completion_tokens)
        self._decisions[details["decision"]] += 1
        return "ok"


if __name__ == "__main__":
    typer.run(main)
