"""
Real prompts through a real server with the real `openai` client: streaming, several keys at once.

    .venv/bin/python scripts/real_traffic.py FILE.jsonl.gz [FILE ...] --requests 240

Files are JSON lines with `messages` (role, content), gzipped or not. Every user turn of a conversation is a
request with the turns before it as history. The server is started on a free port with four keys of two
tenants, and stopped at the end. Prints one JSON document: requests, errors by code, tokens by source. No
prompt text.
"""

import argparse
import asyncio
import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import yaml

KEYS = {"ada": "north", "ben": "north", "cleo": "south", "dan": "south"}
SOURCES = ("exact", "copied", "recomputed", "repaired")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=240, help="in all, evenly from the files")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=2, help="requests in flight per key")
    arguments = parser.parse_args()
    share = arguments.requests // len(arguments.files)
    requests = [r for file in arguments.files for r in _take(_requests(file), share)]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_config(folder)), encoding="utf-8")
        server, url = _start(config)
        try:
            result = asyncio.run(_send_all(requests, url, arguments.concurrency, arguments.max_tokens))
            with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
                result["alive_afterwards"] = response.status == 200
        finally:
            server.terminate()
            result_code = server.wait(timeout=60)
    json.dump({**result, "server_exit_code": result_code}, sys.stdout, indent=1)
    sys.stdout.write("\n")


def _requests(file: Path) -> Iterator[list[dict[str, str]]]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            turns = [
                {"role": turn["role"], "content": turn["content"]} for turn in json.loads(line)["messages"]
            ]
            for number, turn in enumerate(turns):
                if turn["role"] == "user":
                    yield turns[: number + 1]


def _take(requests: Iterator[list[dict[str, str]]], count: int) -> list[list[dict[str, str]]]:
    return [request for request, _ in zip(requests, range(count), strict=False)]


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


def _start(config: Path) -> tuple[subprocess.Popen[str], str]:
    command = [str(Path(sys.executable).with_name("kvshare")), "serve", "--config", str(config)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stderr is not None
    assert server.stdout is not None
    url = ""
    while not url:
        line = server.stderr.readline()
        if not line:
            raise SystemExit(f"the server did not start: exit code {server.poll()}")
        url = next((word.rstrip("/,") for word in line.split() if word.startswith("http://")), "")
    threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True).start()
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
                if response.status == 200:
                    return server, url
        except OSError:
            time.sleep(0.1)
    server.kill()
    raise SystemExit("the server did not get ready within a minute")


async def _send_all(
    requests: list[list[dict[str, str]]], url: str, concurrency: int, max_tokens: int
) -> dict[str, Any]:
    """Each key sends all requests of its share, in order but for `concurrency`, all keys at once."""
    outcomes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    first_token_s: list[float] = []
    names = list(KEYS)
    random.Random(0).shuffle(requests)
    began = time.perf_counter()

    async def send(client: openai.AsyncOpenAI, messages: list[dict[str, str]]) -> None:
        started, first = time.perf_counter(), None
        try:
            stream = await client.chat.completions.create(
                model="kvshare-demo",
                messages=messages,  # type: ignore[arg-type]  # plain dictionaries
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=max_tokens,
                temperature=0,
            )
            usage, finished = None, False
            async for chunk in stream:
                if first is None and chunk.choices and chunk.choices[0].delta.content is not None:
                    first = time.perf_counter() - started
                finished |= bool(chunk.choices and chunk.choices[0].finish_reason)
                usage = chunk.usage or usage
        except openai.APIStatusError as exc:
            outcomes[f"refused: {exc.code}"] += 1
            return
        except openai.APIError as exc:
            outcomes[f"failed: {type(exc).__name__}"] += 1
            return
        if usage is None or not finished:
            outcomes["failed: stream ended without usage or finish_reason"] += 1
            return
        outcomes["ok"] += 1
        first_token_s.append(first or 0.0)
        details = usage.model_extra["kvshare"]
        for source in SOURCES:
            tokens[source] += details[source]
        tokens["prompt"] += usage.prompt_tokens
        tokens["completion"] += usage.completion_tokens
        decisions[details["decision"]] += 1

    async def run_key(number: int) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=_key(names[number]), max_retries=0)
        gate = asyncio.Semaphore(concurrency)

        async def gated(messages: list[dict[str, str]]) -> None:
            async with gate:
                await send(client, messages)

        await asyncio.gather(*(gated(messages) for messages in requests[number :: len(names)]))
        await client.close()

    await asyncio.gather(*(run_key(number) for number in range(len(names))))
    return {
        "requests": len(requests),
        "outcomes": dict(outcomes),
        "tokens": dict(tokens),
        "tokens_add_up": sum(tokens[source] for source in SOURCES) == tokens["prompt"],
        "decisions": dict(decisions),
        "keys": len(names),
        "tenants": len(set(KEYS.values())),
        "wall_s": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    main()
