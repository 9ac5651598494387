"""The plan of a prompt."""

from kvshare.cli.views.parts import Columns, Document, Parts, bold, of, table
from kvshare.cli.views.units import duration, number, text

_KINDS: Columns = {"tokens": of("kind"), "count": of("count", number), "share": of("share", number, ".1%")}
_SPANS: Columns = {
    "positions": lambda span: f"{span['start']}-{span['end']}",
    "tokens": lambda span: number(span["end"] - span["start"]),
    "kind": of("kind"),
    "donor": of("donor"),
    "shift": of("shift", number, "+d"),
}
_DONORS: Columns = {
    "node": of("node"),
    "found by": of("sources", ", ".join),
    "score": of("score", number, ".3f"),
    "similarity": of("similarity", number, ".3f"),
    "tokens used": of("tokens_used", number),
    "outcome": of("outcome"),
}


def explain(document: Document) -> Parts:
    reason = f": {document['reason']}" if document["reason"] else ""
    yield bold(document["decision"], reason)
    if whom := document.get("planned_for"):
        key = f"the private key {whom['key']} of " if whom["key"] else ""
        yield f"planned for {key}tenant {whom['tenant']}, mode {document['mode']}"
    if missed := document.get("cache_miss_reason"):
        yield missed["message"]
    if rules := document.get("rules"):
        yield f"rules that acted: {', '.join(rules)}"
    num_tokens = document["num_tokens"]
    kinds = [
        {"kind": kind, "count": document[kind], "share": document[kind] / max(num_tokens, 1)}
        for kind in ("exact", "copied", "recomputed", "repaired")
    ]
    yield table(_KINDS, kinds, total={"kind": "all", "count": num_tokens, "share": None})
    shared, full, saved = (duration(document["estimate"][name]) for name in ("shared_s", "full_s", "saved_s"))
    computed = number(document["charged_budget"], ".1%")
    saves = f"expected: {shared} instead of {full}, saves {saved}"
    yield f"{saves}; computes {computed} of what a full prefill does"
    if prediction := document.get("prediction"):
        yield _deviation(prediction)
    yield from ("", bold("spans"), table(_SPANS, document["spans"]))
    donors = document["donors"]
    yield from ("", bold("donors"), table(_DONORS, donors) if donors else "none was nominated")
    if times := document["stage_ms"]:
        yield ""
        yield "planned in: " + ", ".join(f"{stage} {ms:.2f} ms" for stage, ms in times.items())


def _deviation(prediction: Document) -> str:
    bound = f"{prediction['bound']:.2g}" if prediction["bound"] < 20 else "unknown"
    return (
        f"deviation: {prediction['expected']:.2g} nats expected of the answer "
        f"({prediction['inherited']:.2g} of it the donors'), bound {bound}, {prediction['limit']:g} allowed; "
        f"repair {prediction['rule']}, {prediction['repaired']:,} tokens; "
        f"calibration {text(prediction['calibration'])}, taken {prediction['caution']:g} times"
    )
