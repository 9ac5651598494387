"""The options and arguments of `kvshare warm`, `replay` and `workload`, as in options.py."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

_API_KEY = "KVSHARE_API_KEY"

# warm
WarmFiles = Annotated[
    list[Path],
    Argument(
        metavar="FILE...",
        exists=True,
        dir_okay=False,
        help=".txt and .md: one document each. Other files: one request body per line, with "
        '"messages" or "prompt".',
    ),
]
WarmUrl = Annotated[str | None, Option(help="The running server. [env: KVSHARE_URL]")]
WarmKey = Annotated[
    str | None, Option(envvar=_API_KEY, help="An API key. Its users will share what is stored.")
]
WarmPin = Annotated[bool, Option("--pin", help="Pin what is stored, and print its ids. Needs an admin key.")]
AdminKey = Annotated[
    str | None,
    Option(envvar="KVSHARE_ADMIN_KEY", help="Admin key, to ask what was stored. [default: the same key]"),
]
AdminUrl = Annotated[
    str | None, Option(help="Address of the admin routes, if server.admin_port is set. [default: --url]")
]
AtATime = Annotated[int, Option(min=1, help="Number of requests at a time.")]
WarmJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]

# replay
LogFiles = Annotated[list[Path], Argument(metavar="FILE", help="Logs: plain, gzip or zstd.")]
LogFormat = Annotated[
    str | None, Option("--format", help="Format of the logs, or plain:FIELD. [default: auto-detected]")
]
Tokenizer = Annotated[
    str | None, Option(help="Hugging Face name, folder or tokenizer.json. [default: SmolLM2's]")
]
Arms = Annotated[
    str | None, Option(help="Policies, with commas; `fast`: all that embed nothing. [default: all]")
]
Capacities = Annotated[
    list[str] | None,
    Option(
        help="Finite stores besides the infinite one, with commas: tokens (500k), bytes (4GiB), or none. "
        "[default: 16GiB; none with --paper, --engine or --tier]"
    ),
]
Tiers = Annotated[
    list[str] | None,
    Option(help="Memory and disk instead: host:64GiB, disk:1TiB, or shares of an unlimited store: host:10%."),
]
Eviction = Annotated[
    str | None,
    Option(
        help="With --tier: policies, with commas: adaptive, copies, lru, s3-fifo, worth. "
        "[default: store.eviction]"
    ),
]
BytesPerToken = Annotated[int | None, Option(min=1, help="KV bytes of a token. [default: Llama-3-8B's]")]
PrefillSpeed = Annotated[float, Option(min=1e-9, help="Your engine's speed, for the time saved.")]
ReplayFolder = Annotated[Path, Option("--out", "-o", help="Folder for report and results.")]
Limit = Annotated[int | None, Option(min=1, help="Only the first N requests.")]
Interleave = Annotated[int, Option(min=1, help="Conversations that take turns, in logs without times.")]
ReplaySeed = Annotated[int, Option(help="Seed of all random choices.")]
Resume = Annotated[bool, Option("--resume", help="Continue an interrupted run.")]
Paper = Annotated[
    bool, Option("--paper", help="Build the source paper's figures 2 and 4 from the log instead.")
]
LiveUrl = Annotated[
    str | None, Option("--engine", metavar="URL", help="Send the log to this server instead.")
]
LiveKey = Annotated[str | None, Option(envvar=_API_KEY, help="With --engine: an API key.")]
InFlight = Annotated[int, Option(min=1, help="With --engine: requests in flight.")]
Speedup = Annotated[
    float | None, Option(min=1e-9, help="With --engine: times the log's pace. [default: no pauses]")
]
MaxTokens = Annotated[int, Option(min=1, help="With --engine: tokens of an answer.")]
ReplayJson = Annotated[bool, Option("--json", help="Write the results to stdout as JSON.")]
Results = Annotated[Path, Argument(help="A folder of results.")]
OtherResults = Annotated[Path, Argument(help="Another, of the same log.")]
Resamples = Annotated[int, Option(min=1, help="Samples of the bootstrap.")]
BootstrapSeed = Annotated[int, Option(help="Seed of the bootstrap.")]

# workload
# As in `kvshare.replay.workloads.WORKLOADS`; named here so that --help need not import it.
WorkloadName = Literal["template", "header", "window", "resubmit", "rag", "agent", "revise"]
Workload = Annotated[WorkloadName, Argument(help="Kind of traffic.")]
WorkloadFile = Annotated[
    Path, Option("--out", "-o", help="JSON lines; compressed if it ends with .gz; - is stdout.")
]
TextSources = Annotated[
    list[Path] | None, Option(help="A file to take the text from; may be repeated. [default: a small sample]")
]
MostRequests = Annotated[int, Option("--requests", "-n", min=1, help="Largest number of requests.")]
WorkloadSeed = Annotated[int, Option(help="Equal seeds and sources give equal files.")]
