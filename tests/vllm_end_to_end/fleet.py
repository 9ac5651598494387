"""
Production in small: two real `vllm serve` with the connector, the real proxy before them, the real `openai`
client, and the demo model, which can tell right answers from wrong ones.
"""

import hashlib
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import yaml

from kvshare.cli.client import JsonClient
from kvshare_lab.demo_model.pairs import Pair, near_duplicate_pairs
from kvshare_lab.vllm.ports import free_ports
from kvshare_lab.vllm.servers import Server, VllmOptions, new_token, running, shared_vllm
from tests.conftest import KEYS
from tests.conftest import Server as EmbeddedServer

MODEL = "bench"
TOOL_PARSER = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
# The demo model's own template knows no tools.
TOOLS_IN_TEMPLATE = "{% if tools %}<|system|>\n{{ tools[0].function.name }}<|end|>{% endif %}"
WAIT_S = 180.0  # of a busy machine
# What is fast on a busy machine is no question here: every plan that is right is made, and which one does not
# depend on how long something took.
ALWAYS: Mapping[str, object] = MappingProxyType(
    {"min_saved_s": -3600.0, "min_saved_fraction": 0.0, "measure_at_start": False, "learn": False}
)


def log_of(server: Server) -> str:
    """Since it was started."""
    return server.log_path.read_text(errors="replace")


def log_tail(server: Server, length: int = 4000) -> str:
    """For the message of a failure."""
    return log_of(server)[-length:]


@dataclass(frozen=True)
class Fleet:
    """Two replicas and the proxy before them."""

    replicas: tuple[Server, Server]
    proxy: Server

    def client(self, name: str, url: str | None = None) -> openai.OpenAI:
        base = url if url is not None else self.proxy.url
        return openai.OpenAI(
            base_url=f"{base}/v1", api_key=EmbeddedServer.key(name), max_retries=0, timeout=WAIT_S
        )

    def why(self) -> str:
        """What the proxy counted, for the message of a failure."""
        counted = (
            f"{name} {value:g}" for name, value in self.counters().items() if value and "_bucket" not in name
        )
        return "\n".join([*counted, log_tail(self.proxy)])

    def unsettled(self) -> list[str]:
        """The ids of the latest requests that vLLM still has, or whose prompts are not in the index yet."""
        client = JsonClient(self.proxy.url, key=EmbeddedServer.key("root"), timeout_s=WAIT_S)
        rows = client.call("/admin/requests", query={"limit": 100})["requests"]
        sent = (row for row in rows if row.get("replica") is not None)
        return [row["id"] for row in sent if not all(entry["settled"] for entry in row["stored"])]

    def counters(self) -> dict[str, float]:
        """The proxy's metrics by name and labels."""
        request = urllib.request.Request(
            f"{self.proxy.url}/metrics", headers={"Authorization": f"Bearer {EmbeddedServer.key('root')}"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            lines = reply.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        }


def replica_info(replica: Server) -> dict[str, Any]:
    """What its connector says of itself."""
    token = replica.environment["KVSHARE_VLLM_TOKEN"]
    info: dict[str, Any] = JsonClient(str(replica.control_url), key=token, timeout_s=WAIT_S).call("/info")
    return info


@contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Two vLLMs with the demo model, and the proxy before them. Their files are in the folder."""
    from kvshare_lab.demo_model.export import export

    model = export(folder / "demo")
    template = model / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("<|begin|>", f"<|begin|>{TOOLS_IN_TEMPLATE}", 1), encoding="utf-8"
    )
    token = new_token()
    options = VllmOptions(
        dtype="float32", max_model_len=2048, max_num_batched_tokens=2048, enforce_eager=True
    )
    replicas = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        own = folder / name
        replica = shared_vllm(model, own, options, kv_bytes=1 << 29, token=token, disk=own / "kv")
        replica.command = [*replica.command, *TOOL_PARSER]
        replicas.append(replica)
    proxy = proxy_with_keys(replicas, folder, token)
    with running(replicas), running([proxy]):
        wait_connected(proxy, replicas)
        yield Fleet((replicas[0], replicas[1]), proxy)


def proxy_with_keys(
    replicas: Sequence[Server], folder: Path, token: str, *, cost: Mapping[str, object] = ALWAYS
) -> Server:
    """`kvshare serve --engine vllm` with several tenants. `cost`: its settings of that name."""
    keys = [
        {
            "name": name,
            "sha256": hashlib.sha256(EmbeddedServer.key(name).encode()).hexdigest(),
            "tenant": tenant,
            "scope": scope,
            "role": role,
        }
        for name, (tenant, scope, role) in KEYS.items()
    ]
    config = folder / "config.yaml"
    off = {"unshared_share": 0.0}
    index = {"dense": False, "search_timeout_s": 60.0}  # the first search after a start is slow
    settings = {"auth": {"keys": keys}, "cost": dict(cost), "control": off, "index": index}
    settings["vllm"] = {"connect_timeout_s": WAIT_S, "control_timeout_s": WAIT_S}
    settings["sharing"] = {"max_risk": 1.0}  # nor what is certified of the forms model
    config.write_text(yaml.safe_dump(settings))
    port = free_ports(1)[0]
    ends = [
        text
        for replica in replicas
        for text in ("--vllm-url", replica.url, "--vllm-control-url", str(replica.control_url))
    ]
    return Server(
        name="the proxy",
        command=[
            *(sys.executable, "-m", "kvshare.cli.main", "serve", "--engine", "vllm"),
            *("--port", str(port), "--config", str(config), "--store", str(folder / "store"), *ends),
        ],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "proxy.log",
        environment={"HF_HUB_OFFLINE": "1", "KVSHARE_VLLM_TOKEN": token},
        ready_path="/ready",
    )


def pair(seed: int) -> Pair:
    return next(near_duplicate_pairs(seed=seed, count=1))


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **extra: Any) -> tuple[str, int, int]:
    """The answer, the prompt's tokens, and how many of them were not computed."""
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]  # plain dictionaries
        temperature=0,
        max_tokens=12,
        extra_body=extra or None,
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    return (reply.choices[0].message.content or "").strip(), reply.usage.prompt_tokens, cached


def wait_until(condition: Callable[[], object], why: Callable[[], object]) -> None:
    """`why`: what is told if it never holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


def wait_connected(proxy: Server, replicas: Sequence[Server]) -> None:
    """
    Until the proxy shares with each of these replicas.

    It is ready as soon as one vLLM serves, and asks those that do not yet only now and then; what came before
    this would be served by others, or unshared. By then the index has the prompts of the proxy's last run.
    """
    for name in (replica.url.removeprefix("http://") for replica in replicas):
        for line in (f"replica {name} serves", f"replica {name}: connected"):
            wait_until(lambda line=line: line in log_of(proxy), lambda: log_tail(proxy))  # type: ignore[misc]


def settled(fleet: Fleet, before: float) -> None:
    """Wait until the proxy has stored and indexed what was asked since it had `before` prompts."""
    wait_until(lambda: num_nodes(fleet) > before, fleet.why)
    rested(fleet)


def num_nodes(fleet: Fleet) -> float:
    return next(value for name, value in fleet.counters().items() if name.startswith("kvshare_tree_nodes"))


def rested(fleet: Fleet) -> float:
    """How many prompts the proxy has, once no more come: every request so far is stored and in the index."""
    wait_until(lambda: not fleet.unsettled(), lambda: f"not settled: {fleet.unsettled()}\n{fleet.why()}")
    return num_nodes(fleet)


def donate(fleet: Fleet, client: openai.OpenAI, messages: list[dict[str, str]], **extra: Any) -> None:
    before = rested(fleet)
    ask(client, messages, **extra)
    settled(fleet, before)
