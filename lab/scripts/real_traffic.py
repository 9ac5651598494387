"""
Real prompts through a real server with the real `openai` client: streamed, with several keys at once.

    .venv/bin/python lab/scripts/real_traffic.py FILE.jsonl.gz [FILE ...] --requests 240

Files are logs of conversations in any format that `kvshare replay` reads. The server is started on a free
port with four keys of two tenants, and stopped at the end. Prints one JSON document without prompt text:
requests, errors by code, tokens by source.
"""

import asyncio
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

from kvshare.logs import ReadReport, read_file

KEYS = {"kvs-test-ada": "north", "kvs-test-ben": "north", "kvs-test-cleo": "south", "kvs-test-dan": "south"}
SOURCES = ("exact", "copied", "recomputed", "repaired")
Messages = list[Any]


def main(
    files: list[Path],
    *,
    requests: Annotated[int, typer.Option(help="in all, evenly from the files")] = 240,
    max_tokens: int = 16,
    concurrency: Annotated[int, typer.Option(help="requests in flight per key")] = 2,
) -> None:
    """Real prompts through a real server: requests, errors by code, tokens by source, as JSON."""
    share = requests // len(files)
    logged = (islice((one for row in read_file(file, ReadReport()) for one in row), share) for file in files)
    messages = [[*map(dict, one.messages or ())] for some in logged for one in some]
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
                result = asyncio.run(_send_all(url, messages, max_tokens, concurrency))
                with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
                    result["alive_afterwards"] = response.status == 200
            finally:
                server.terminate()
                result_code = server.wait(timeout=60)
    typer.echo(json.dumps({**result, "server_exit_code": result_code}, indent=1))


def _config(folder: str) -> dict[str, Any]:
    keys = [
        {"name": key, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant}
        for key, tenant in KEYS.items()
    ]
    model = {"path": "demo"}  # the requests name it, and its 4,096 tokens are part of the figures
    store = {"path": f"{folder}/store"}
    return {"auth": {"keys": keys}, "model": model, "store": store, "server": {"port": 0}}


async def _send_all(url: str, requests: list[Messages], max_tokens: int, concurrency: int) -> dict[str, Any]:
    """Each key sends its share of the requests, `concurrency` at a time; all keys at once."""
    outcomes, tokens, decisions = Counter[str](), Counter[str](), Counter[str]()

    async def send_share(key: str, share: Iterator[Messages]) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            await asyncio.gather(*(send_some(client, share) for _ in range(concurrency)))

    async def send_some(client: openai.AsyncOpenAI, share: Iterator[Messages]) -> None:
        for messages in share:
            outcome, usage = await _send(client, messages, max_tokens)
            outcomes[outcome] += 1
            if usage is not None:
                details = (usage.model_extra or {})["kvshare"]
                tokens.update({source: details[source] for source in SOURCES})
                tokens.update(prompt=usage.prompt_tokens, completion=usage.completion_tokens)
                decisions[details["decision"]] += 1

    random.Random(0).shuffle(requests)
    began = time.perf_counter()
    shares = (iter(requests[at :: len(KEYS)]) for at in range(len(KEYS)))
    await asyncio.gather(*map(send_share, KEYS, shares))
    return {
        "requests": len(requests),
        "outcomes": dict(outcomes),
        "tokens": dict(tokens),
        "tokens_add_up": sum(tokens[source] for source in SOURCES) == tokens["prompt"],
        "decisions": dict(decisions),
        "keys": len(KEYS),
        "tenants": len(set(KEYS.values())),
        "wall_s": round(time.perf_counter() - began, 1),
    }


async def _send(
    client: openai.AsyncOpenAI, messages: Messages, max_tokens: int
) -> tuple[str, openai.types.CompletionUsage | None]:
    """The outcome of a request, in a word, and the usage of one that was answered."""
    usage, is_finished = None, False
    try:
        async for chunk in await client.chat.completions.create(
            model="kvshare-demo",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=max_tokens,
            temperature=0,
        ):
            is_finished |= bool(chunk.choices and chunk.choices[0].finish_reason)
            usage = chunk.usage or usage
    except openai.APIStatusError as exc:
        return f"refused: {exc.code}", None
    except openai.APIError as exc:
        return f"failed: {type(exc).__name__}", None
    if usage is None or not is_finished:
        return "failed: stream ended without usage or finish_reason", None
    return "ok", usage


if __name__ == "__main__":
    typer.run(main)
