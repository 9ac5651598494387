"""
Runs every replay that docs/replay.md quotes and prints its tables; documents go to docs/measured/replay/.

    .venv/bin/python scripts/replay_logs.py DATA OUT [--gates | --stores] [NAME ...] > tables.md

With --gates the arms differ in what KVShare refuses, with --stores in how much they may keep. DATA has the
logs in the layout of `LOGS` and `WORKLOADS`; OUT gets the workloads, a tokenizer and each run's folder with
its report. A document here is a run's results.json without what only its report needs. No prompt text in any
of them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "measured" / "replay"
PROGRAM = Path(sys.executable).with_name("kvshare")
Document = dict[str, Any]

FOUND = "kvshare-fingerprints-open"
SAVEABLE = "oracle:tail=1"  # nobody saves the last token
MEANING = ("kvshare-semantic-open", "kvshare-semantic-open:max_distance=0.15")
FAST = ("prefix", "chunks", "kvshare-fingerprints", FOUND, "oracle", SAVEABLE)
ALL = ("prefix", "chunks", "response", "kvshare", *MEANING, FOUND, "oracle", SAVEABLE)
# What each gate costs: as configured, copies from any distance, of any generation, both, and nothing refused.
FAR, DEEP = "max_relocated_fraction=1", "max_generation=99"
GATES = (
    "kvshare-fingerprints",
    f"kvshare-fingerprints:{FAR}",
    f"kvshare-fingerprints:{DEEP}",
    f"kvshare-fingerprints:{FAR}:{DEEP}",
    f"kvshare-fingerprints:{FAR}:{DEEP}:min_saved_fraction=0",
    FOUND,
    "oracle",
)
STORES = ("prefix", "chunks", "kvshare-fingerprints", "oracle")
GIB = (1, 4, 16, 64)  # at 128 KiB a token, Llama-3-8B's
KEPT = (
    "arm",
    "capacity_tokens",
    "token_hit_rate",
    "request_hit_rate_50",
    "request_hit_rate_70",
    "request_hit_rate_90",
    "num_answered",
    "num_false_hits",
    "num_repaired_tokens",
    "storage",
    "ttft_saved_s",
    "num_copies",
    "num_donors",
    "shift_tokens",
)
GROUPS = ("length", "turn", "origin")
GROUP_FIGURES = ("num_requests", "num_tokens", "token_hit_rate")


@dataclass(frozen=True)
class Log:
    """Files below DATA, and the options and arms of their replay."""

    title: str
    files: tuple[str, ...]
    options: tuple[str, ...] = ()
    arms: tuple[str, ...] = ALL


LOGS: Mapping[str, Log] = {
    "wildchat": Log("WildChat, first turns", ("wildchat_user_4k/wildchat_user.jsonl.gz",)),
    "wildchat-ru": Log("WildChat, Russian", ("wildchat_hard_ru/wildchat_hard_ru.jsonl.gz",)),
    "sharegpt-en": Log("ShareGPT, English chats", ("sharegpt_en_1k/sharegpt_en.jsonl.gz",)),
    "sharegpt-zh": Log("ShareGPT, Chinese chats", ("sharegpt_zh_1k/sharegpt_zh.jsonl.gz",), arms=FAST),
    "aibrix": Log("AIBrix serving workload", ("sharegpt_replay_aibrix/workload_8min.jsonl.gz",)),
    "prompts-chat": Log("prompts.chat, templates", ("prompts_chat/prompts.jsonl.gz",)),
    "aibrix-5s": Log("AIBrix, five seconds", ("sharegpt_replay_aibrix/workload_5s.jsonl.gz",)),
    "mooncake-synthetic": Log(
        "Mooncake, synthetic trace", ("request_traces/mooncake_synthetic.jsonl.gz",), arms=FAST
    ),
    "mooncake": Log(
        "Mooncake trace, first 4,000",
        ("request_traces/mooncake_conversation.jsonl.gz",),
        ("--limit", "4000"),
        FAST,
    ),
    "medical": Log(
        "Medical one-line queries",
        ("medical_template_queries/medical_queries.jsonl.gz",),
        ("--format", "plain:query"),
        FAST,
    ),
    "support": Log(
        "Support requests of one line",
        ("customer_support_bitext/bitext.jsonl.gz",),
        ("--format", "plain:instruction"),
        FAST,
    ),
}
WORKLOADS: Mapping[str, tuple[str, ...]] = {
    "template": ("prompts_chat/prompts.jsonl.gz",),
    "header": ("prompts_chat/prompts.jsonl.gz",),
    "window": ("sharegpt_en_1k/sharegpt_en.jsonl.gz",),
    "resubmit": ("sharegpt_en_1k/sharegpt_en.jsonl.gz",),
    "rag": ("rag_cacheblend/musique_s.jsonl.gz", "rag_cacheblend/wikimqa_s_clean.jsonl.gz"),
    "agent": ("rag_cacheblend/musique_s.jsonl.gz", "rag_cacheblend/wikimqa_s_clean.jsonl.gz"),
}
COLUMNS = (
    "| log | requests | tokens | prefix | chunks | response cache: right, wrong | KVShare | found "
    "| oracle | found / oracle | found / saveable |"
)
DETAIL_COLUMNS = (
    "| log | prefix: 50, 70, 90 % | KVShare: 50, 70, 90 % | copies, donors a plan | moved by, mean | "
    "hit rate by turn | requests with hits, by whose donors | found by meaning: 0.05, 0.15 |"
)
GATE_COLUMNS = (
    "| log | KVShare | from any distance | of any generation | both | however little it saves | "
    "nothing repaired | oracle |"
)
STORE_COLUMNS = f"| log | arm | {' | '.join(f'{gib} GiB' for gib in GIB)} | infinite |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*LOGS, *WORKLOADS]))
    parser.add_argument("--gates", action="store_true", help="what each gate costs")
    parser.add_argument("--stores", action="store_true", help="what a finite store costs")
    given = parser.parse_intermixed_args()
    data, out = given.data, given.out
    if unknown := set(given.names) - {*LOGS, *WORKLOADS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    out.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = out / "tekken"
    if not tokenizer.exists():
        script = Path(__file__).with_name("tekken_tokenizer.py")
        subprocess.run([sys.executable, script, tokenizer], check=True, stdout=subprocess.DEVNULL)
    columns, details = COLUMNS, [DETAIL_COLUMNS, _rule(DETAIL_COLUMNS)]
    if given.gates:
        columns, details = GATE_COLUMNS, []
    elif given.stores:
        columns, details = STORE_COLUMNS, []
    lines = [columns, _rule(columns)]
    for name in given.names or (*LOGS, *WORKLOADS):
        log, files = _log(name, data, out)
        if given.gates:
            name, log = f"{name}-gates", replace(log, arms=GATES)
        elif given.stores:
            options = (*log.options, "--interleave", "16")
            name, log = f"{name}-stores", replace(log, arms=STORES, options=options)
        capacity = ",".join(f"{gib}GiB" for gib in GIB) if given.stores else "none"
        document = _replay(log, files, out / name, tokenizer, capacity)
        (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if given.gates:
            lines.append(_gates_row(log.title, document))
        elif given.stores:
            lines += _stores_rows(log.title, document)
        else:
            lines.append(_row(log.title, document))
            details.append(_details_row(log.title, document))
    sys.stdout.write("\n".join([*lines, "", *details]) + "\n")


def _log(name: str, data: Path, out: Path) -> tuple[Log, list[Path]]:
    """A log or workload and its files; a workload is made."""
    if name in LOGS:
        return LOGS[name], [data / path for path in LOGS[name].files]
    return Log(f"`{name}`", WORKLOADS[name]), [_workload(name, data, out)]


def _rule(columns: str) -> str:
    return "|---" * columns.count(" |") + "|"


def _workload(name: str, data: Path, out: Path) -> Path:
    path = out / f"{name}.jsonl.gz"
    sources = [text for source in WORKLOADS[name] for text in ("--source", str(data / source))]
    subprocess.run([PROGRAM, "workload", name, "--out", path, *sources, "--requests", "1000"], check=True)
    return path


def _replay(log: Log, files: list[Path], folder: Path, tokenizer: Path, capacity: str) -> Document:
    command = [PROGRAM, "replay", *files, *log.options, "--tokenizer", tokenizer, "--out", folder]
    command += ["--capacity", capacity]
    run = subprocess.run(
        [*command, "--arms", ",".join(log.arms), "--json"], stdout=subprocess.PIPE, check=True, text=True
    )
    whole = json.loads(run.stdout)
    kept = {key: whole[key] for key in ("schema_version", "kind", "config", "data", "versions", "waterfall")}
    arms = [{**{key: arm[key] for key in KEPT}, "by": _groups(arm["by"])} for arm in whole["arms"]]
    times = {key: whole["times"][key] for key in ("wall_s", "requests_per_s")}
    return {**kept, "arms": arms, "times": times}


def _groups(by: Document) -> Document:
    return {
        kind: {key: {name: figures[name] for name in GROUP_FIGURES} for key, figures in by[kind].items()}
        for kind in GROUPS
    }


def _gates_row(title: str, document: Document) -> str:
    rates = [_percent(arm["token_hit_rate"]) for arm in document["arms"]]
    return f"| {title} | {' | '.join(rates)} |"


def _stores_rows(title: str, document: Document) -> list[str]:
    rows: dict[str, dict[int | None, float]] = {}
    for arm in document["arms"]:
        rows.setdefault(arm["arm"], {})[arm["capacity_tokens"]] = arm["token_hit_rate"]
    sizes = sorted({size for rates in rows.values() for size in rates if size is not None})
    return [
        f"| {title} | {arm} | {' | '.join(_percent(rates[size]) for size in (*sizes, None))} |"
        for arm, rates in rows.items()
    ]


def _details_row(title: str, document: Document) -> str:
    arms = {arm["arm"]: arm for arm in document["arms"]}
    ours = arms.get("kvshare") or arms["kvshare-fingerprints"]
    meaning = [_percent(arms[name]["token_hit_rate"]) for name in MEANING if name in arms]
    cells = (
        title,
        _reached(arms["prefix"]),
        _reached(ours),
        f"{ours['num_copies']['mean'] or 0:.1f}, {ours['num_donors']['mean'] or 0:.1f}",
        f"{ours['shift_tokens']['mean'] or 0:,.0f} tokens",
        ", ".join(
            f"{key} {_percent(one['token_hit_rate'])}" for key, one in sorted(ours["by"]["turn"].items())
        ),
        ", ".join(
            f"{key} {one['num_requests']:,}"
            for key, one in sorted(ours["by"]["origin"].items())
            if key != "none"
        ),
        ", ".join(meaning),
    )
    return f"| {' | '.join(cells)} |"


def _reached(arm: Document) -> str:
    """Requests of which at least so much was not computed: the paper's reading."""
    return ", ".join(_percent(arm[f"request_hit_rate_{share}"]) for share in (50, 70, 90))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _row(title: str, document: Document) -> str:
    arms = {arm["arm"]: arm for arm in document["arms"]}

    def share(*names: str) -> str:
        rates = [arms[name]["token_hit_rate"] for name in names if name in arms]
        return _percent(rates[0]) if rates else ""

    response = arms.get("response")
    answers = ""
    if response is not None:
        wrong = response["num_false_hits"]
        answers = f"{response['num_answered'] - wrong:,}, {wrong:,}"
    found = arms[FOUND]["token_hit_rate"]
    data = document["data"]
    cells = (
        title,
        f"{data['num_requests']:,}",
        f"{data['num_tokens'] / 1e6:.2f} M",
        share("prefix"),
        share("chunks"),
        answers,
        share("kvshare", "kvshare-fingerprints"),
        share(FOUND),
        share("oracle"),
        *(f"{100 * found / arms[of]['token_hit_rate']:.0f} %" for of in ("oracle", SAVEABLE)),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
