"""The latest requests of a server, and one of them."""

from itertools import chain, repeat

from kvshare.cli.views.parts import Columns, Document, Parts, facts, of, table
from kvshare.cli.views.units import counted, duration, number, percent

_LATEST: Columns = {
    "id": of("id"),
    "came in": of("came_in"),
    "key": of("key"),
    "outcome": of("outcome"),
    "tokens": of("num_tokens", number),
    "reused": of("reused_share", percent, 0),
    "first token": of("first_token_s", duration),
    "in all": of("total_s", duration),
}
_KINDS: Columns = {"tokens": of("kind"), "count": of("count", number), "share": of("share", percent, 1)}


def requests(document: Document) -> Parts:
    yield table(_LATEST, document["rows"]) if document["rows"] else "no requests since the start"


def request(document: Document) -> Parts:
    yield facts(_facts(document))
    if missed := document["cache_miss_reason"]:
        yield missed["message"]
    stored = chain(document.get("stored", ()), repeat({}))
    for prompt, found in zip(document["prompts"], stored, strict=False):
        yield from ("", *_prompt(prompt, found.get("deviation")))
    if gone := document.get("gone"):
        yield f"evicted since: {_list(gone)}"
    if document["took"]:
        took = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in document["took"].items())
        yield from ("", f"times: {took}")


def _facts(document: Document) -> dict[str, object]:
    ended = f", ended by {document['finish_reason']}" if document["finish_reason"] else ""
    return {
        "request": document["id"],
        "came in": document["came_in"],
        "key": f"{document['key']}, tenant {document['tenant']}",
        "endpoint": document["endpoint"],
        "mode": document["mode"],
        "outcome": document["outcome"],
        "rules": _list(document["rules"]) or "none acted",
        "answer": (counted(document["completion_tokens"], "token") or "not counted here") + ended,
        "stored as": _list(document["stored_as"]),
    }


def _prompt(prompt: Document, measured: float | None) -> Parts:
    num_tokens = prompt["prompt_tokens"]
    kinds = [
        {"kind": kind, "count": prompt[kind], "share": prompt[kind] / num_tokens if num_tokens else None}
        for kind in ("exact", "copied", "recomputed", "repaired")
    ]
    yield table(_KINDS, kinds, total={"kind": "all", "count": num_tokens, "share": None})
    if prompt["donors"]:
        yield f"donors: {_list(prompt['donors'])}"
    if prediction := prompt["prediction"]:
        expected, limit = prediction["expected"], prediction["limit"]
        found = "" if measured is None else f", {measured:.2g} measured"
        rule = prediction["rule"]
        yield f"deviation: {expected:.2g} nats expected, {limit:g} allowed{found}; repair {rule}"


def _list(values: list[object]) -> str:
    return ", ".join(map(str, values))
