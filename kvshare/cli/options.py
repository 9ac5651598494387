"""
The options and arguments of the commands, and what `--help` says of each; defaults are in the signatures.

A flag is called as the parameter, unless it is given here. `kvshare --help` imports this: nothing heavy.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from kvshare.cli.connector_options import parse_bytes, parse_connector, parse_shared_tier
from kvshare.cli.source import Api, TreeOrder

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class OutputFormat(StrEnum):
    """The format of the answer on stdout."""

    TERMINAL = "terminal"
    JSON = "json"


# several commands
Format = Annotated[OutputFormat, Option("--format", help="terminal for people, json for programs.")]
Config = Annotated[
    Path | None, Option("--config", "-c", help="A YAML file with the settings that differ from the defaults.")
]
Url = Annotated[str | None, Option(help="Ask the running server at this address. [env: KVSHARE_URL]")]
Key = Annotated[str | None, Option(help="The server's admin key. [env: KVSHARE_ADMIN_KEY]")]
Store = Annotated[Path | None, Option(help="Read this store of a stopped server. [default: store.path]")]
NamespaceDigest = Annotated[
    str | None,
    Option("--namespace", help="Only this namespace: its digest, or at least four of its first digits."),
]
TenantName = Annotated[str | None, Option("--tenant", help="Only this tenant, by its name.")]

# serve
Host = Annotated[str | None, Option(help="Address to listen on. [default: loopback]")]
Port = Annotated[
    int | None, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one. [default: 8000]")
]
Model = Annotated[
    str | None,
    Option(help="A Hugging Face name or path, or demo, the bundled forms model. [default: SmolLM2-135M]"),
]
ServedName = Annotated[
    str | None, Option(help="The model's name for clients. [default: the last part of its path]")
]
StoreFolder = Annotated[
    Path | None,
    Option("--store", help="Folder for metadata and index. In memory with `store.path: null` in the config."),
]
Mode = Annotated[
    Literal["off", "exact", "approx"] | None, Option(help="Sharing mode of requests that do not set one.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None, Option(help="Number format of weights and KV.")
]
Engine = Annotated[
    Literal["embedded", "vllm"] | None,
    Option(help="Where the model runs: in this process, or in vLLM. [default: embedded]"),
]
VllmUrls = Annotated[
    list[str] | None, Option(help="A vLLM server, as http://host:port; may be given several times.")
]
VllmControlUrls = Annotated[
    list[str] | None,
    Option(help="The control server of its connector, in the order of --vllm-url. [default: the next port]"),
]
VllmRanks = Annotated[
    int | None,
    Option(
        min=1,
        help="Data-parallel ranks of each vLLM; the ports of their control servers count up. [default: 1]",
    ),
]
PrintSettings = Annotated[bool, Option("--dry-run", help="Print the resolved settings and stop.")]

# vllm
VllmArguments = Annotated[
    list[str], Argument(metavar="MODEL", help="The model, then any options of `vllm serve`.")
]
ControlHost = Annotated[str, Option(help="Address on which the connector answers the KVShare server.")]
ControlPort = Annotated[
    int | None, Option(min=1, max=65535, help="Port of the connector. [default: vLLM's --port plus 1]")
]
KvBytes = Annotated[
    int,
    Option(
        parser=parse_bytes,
        metavar="SIZE",
        show_default=False,
        help="Host memory for stored KV. [default: 4GiB]",
    ),
]
Disk = Annotated[
    Path | None,
    Option(
        metavar="PATH",
        help="Folder for stored KV on disk, which outlives vLLM. [default: none, KV is in memory only]",
    ),
]
DiskBytes = Annotated[
    int | None,
    Option(
        parser=parse_bytes,
        metavar="SIZE",
        help="How much KV the folder may hold. [default: twice --kv-bytes]",
    ),
]
SharedTier = Annotated[
    dict[str, Any] | None,
    Option(
        parser=parse_shared_tier,
        metavar="URL",
        help="Valkey or Redis for KV that several vLLMs share: redis://HOST:6379/0, or JSON with settings of "
        "shared_tier. [default: none]",
    ),
]
Beside = Annotated[
    dict[str, Any] | None,
    Option(
        parser=parse_connector,
        metavar="JSON",
        help="Another connector that keeps KV, as in vLLM's --kv-transfer-config: it loads what KVShare does "
        "not have.",
    ),
]
PrintCommand = Annotated[bool, Option("--print-command", help="Print the command for a shell, and stop.")]

# doctor
RunningVllm = Annotated[
    str | None, Option("--vllm-url", help="Check the running vLLM at this address instead.")
]
RunningConnector = Annotated[
    str | None, Option("--vllm-control-url", help="Address of its connector. [default: the next port]")
]
RunningRanks = Annotated[
    int, Option("--vllm-data-parallel-size", min=1, help="Number of its data-parallel ranks.")
]

# tree, node, diff
TreeRoot = Annotated[int | None, Argument(help="Show only this prompt and its descendants.")]
Depth = Annotated[int, Option(min=1, help="Number of levels.")]
Sort = Annotated[TreeOrder, Option(help="Order of siblings: the one with most of this comes first.")]
NodeId = Annotated[int, Argument(metavar="ID", help="A prompt of `kvshare tree`.")]
DiffFrom = Annotated[int, Argument(help="The first prompt.")]
DiffTo = Annotated[int, Argument(help="The prompt to compare with it.")]
MinRun = Annotated[
    int, Option(min=1, help="Matches shorter than this count as changes; see sharing.min_run.")
]

# evict, pin, unpin
EvictId = Annotated[int | None, Argument(metavar="[ID]", help="The prompt to evict.")]
EvictAll = Annotated[bool, Option("--all", help="Evict every namespace.")]
OlderThan = Annotated[
    str | None, Option(help="Only unpinned prompts that were not used for this long: 90s, 30m, 12h or 7d.")
]
Yes = Annotated[bool, Option("--yes", "-y", help="Confirm that more than one prompt is evicted.")]
EvictDryRun = Annotated[bool, Option("--dry-run", "-n", help="Show what would be freed, and evict nothing.")]
PinId = Annotated[int | None, Argument(metavar="[ID]", help="The prompt to pin.")]
UnpinId = Annotated[int | None, Argument(metavar="[ID]", help="The prompt to unpin.")]
UnpinAll = Annotated[bool, Option("--all", help="Unpin every prompt.")]

# explain
Prompt = Annotated[str | None, Option("--prompt", "-p", help="One user message.")]
RequestFile = Annotated[
    typer.FileText | None,
    Option(
        "--file",
        "-f",
        metavar="<path>",
        encoding="utf-8",
        help="A request body, or only its messages, as JSON; - reads stdin.",
    ),
]
RequestApi = Annotated[Api, Option(help="The API that the request is for. Other than chat: with --url only.")]
PlanTenant = Annotated[
    str | None, Option(help="Plan as for this tenant's requests; with --url only. [default: that of the key]")
]
PlanKey = Annotated[
    str | None, Option(help="Plan as for the requests of the key with this name; with --url only.")
]

# config, usage, top, store
ShowAll = Annotated[bool, Option("--all", "-a", help="Show the defaults, too.")]
SettingPath = Annotated[str, Argument(help="The setting, such as sharing.max_mode or logging.level.")]
SettingValue = Annotated[str, Argument(help="As in YAML; null restores what the files say.")]
UsageBy = Annotated[
    Literal["key", "tenant", "day"], Option(help="What each row is for: a key, a tenant or a day.")
]
Since = Annotated[str | None, Option(help="The first day, as 2026-11-01 (UTC).")]
Csv = Annotated[bool, Option("--csv", help="Print the rows as CSV.")]
Once = Annotated[bool, Option("--once", help="Show it once, and end.")]
TopJson = Annotated[bool, Option("--json", help="As JSON: a line each time, or with --once a document.")]
Interval = Annotated[float, Option(min=0.2, help="Seconds between updates.")]
CountOnly = Annotated[bool, Option("--dry-run", "-n", help="Only count what would be deleted.")]

# requests
MOST_REQUESTS = 1000  # that a server lists
RequestId = Annotated[
    str | None,
    Argument(
        metavar="[ID]",
        help="A request, by X-KVShare-Request or enough of its first digits. [default: lists the latest]",
    ),
]
Latest = Annotated[int, Option("--limit", min=1, max=MOST_REQUESTS, help="How many of the latest.")]
AsJson = Annotated[bool, Option("--json", help="As JSON: the same as --format json.")]

# hash-key, verify
Generate = Annotated[bool, Option("--generate", "-g", help="Make a new random key and show it once.")]
VerifiedModel = Annotated[str, Argument(help="A folder, a Hugging Face name, default or demo.")]
ComputeDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "auto"], Option(help="Number format to compute in.")
]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]


def checked_url(url: str | None, option: str) -> str:
    """Return the URL of the option. Raises a usage error if it is missing or not an http(s) URL."""
    if url is None or not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"expected http://host:port, got {url!r}", param_hint=option)
    return url


def seconds(text: str, option: str) -> int:
    """Return a duration like 90s, 30m, 12h or 7d. Raises a usage error for another one."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(
            f"expected a duration like 90s, 30m, 12h or 7d, got {text!r}", param_hint=option
        )
    return int(match[1]) * _SECONDS[match[2]]
