"""
`kvshare doctor --vllm-url`: is this vLLM up, does it run KVShare's connector, and is it set up as it must be.

Asks vLLM's own routes and the connector's control server. It computes one token, changes no setting and
reads nothing of what others asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvshare import __version__
from kvshare.cli.checks import Check, State, first_line
from kvshare.cli.client import AnswerError, JsonClient
from kvshare.errors import KVShareError, UnreachableError, UpstreamError
from kvshare.fleet.client import API_KEY_VARIABLE, ControlClient
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import PROTOCOL, TOKEN_VARIABLE, ReplicaInfo
from kvshare.vllm_protocol.versions import TESTED, untested

if TYPE_CHECKING:
    from kvshare.settings import ReplicaSettings

_LOCKED = (401, 403)
_START = "start it with `kvshare vllm MODEL`"
_ADDRESS = "give the connector's address: --vllm-control-url, or control_url in the config"


def check_replicas(replicas: Sequence[ReplicaSettings]) -> list[Check]:
    """The findings of each vLLM that the settings name."""
    if not replicas:
        detail = "engine.kind is vllm, and vllm.replicas names none"
        return [Check("vllm", State.FAIL, detail, f"{_START}, and add its address")]
    return [check for replica in replicas for check in check_vllm(replica.url, replica.control)]


def check_vllm(url: str, control_url: str) -> list[Check]:
    """All findings, vLLM's own first. Those that need an answer which did not come are left out."""
    server = JsonClient(url, key=os.environ.get(API_KEY_VARIABLE))
    checks, models = _check_server(server, url)
    info, answers = asyncio.run(_check_control(control_url))
    checks.append(answers)
    if info is not None:
        checks += _check_info(info, models)
        checks += _check_settings(info.settings)
    if models and (info is None or "prompt_tokens_details" not in info.settings):
        checks.append(_probe_details(server, str(models[0]["id"])))
    return checks


def _check_server(server: JsonClient, url: str) -> tuple[list[Check], Sequence[Mapping[str, Any]]]:
    """What vLLM says of itself, and the models it serves."""
    try:
        server.ping("/health")
    except UnreachableError as exc:
        return [Check("vllm", State.FAIL, f"{url}: {exc.problem}", f"{_START}, or correct the address")], ()
    except AnswerError as exc:
        return [Check("vllm", State.FAIL, f"/health: {exc.status} {exc.message}", "restart this vLLM")], ()
    checks = [Check("vllm", State.OK, f"{url} is healthy"), _check_version(server)]
    try:
        models = server.get("/v1/models")["data"]
        detail = ", ".join(str(model["id"]) for model in models)
    except (KVShareError, KeyError, TypeError) as exc:
        remedy = f"set {API_KEY_VARIABLE} to its --api-key" if _is_locked(exc) else "is that a vLLM?"
        return [*checks, Check("models", State.FAIL, f"/v1/models: {first_line(exc)}", remedy)], ()
    return [*checks, Check("models", State.OK, detail)], models


def _check_version(server: JsonClient) -> Check:
    try:
        version = str(server.get("/version")["version"])
    except (KVShareError, KeyError) as exc:
        return Check("version", State.FAIL, f"/version: {first_line(exc)}", "is that a vLLM?")
    reason = untested(version)
    if reason is not None:
        return Check("version", State.WARN, reason, f"install vllm{','.join(TESTED)}")
    return Check("version", State.OK, version)


async def _check_control(url: str) -> tuple[ReplicaInfo | None, Check]:
    """What the connector says of itself, and whether it could be asked."""
    try:
        async with ControlClient(url) as control:
            info = await control.info()
    except UpstreamError as exc:
        if isinstance(exc.__cause__, WireError):
            remedy = "install the same kvshare here and there, and restart this vLLM"
            return None, Check("protocol", State.FAIL, str(exc.__cause__), remedy)
        remedy = f"no connector, or on another port: {_START}, or {_ADDRESS}"
        if exc.status in _LOCKED:
            remedy = f"set {TOKEN_VARIABLE} to what this vLLM was started with"
        elif exc.status is not None:
            remedy = f"is that the connector's port? {_START}, or {_ADDRESS}"
        return None, Check("control", State.FAIL, str(exc), remedy)
    return info, Check("control", State.OK, f"{url}, protocol {PROTOCOL}")


def _check_info(info: ReplicaInfo, models: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """What the connector says of its model, its limits and its memory."""
    served = {str(model.get(name)) for model in models for name in ("id", "root")}
    if served and info.model not in served:
        remedy = _ADDRESS
        yield Check("model", State.WARN, f"the connector's is {info.model}: another vLLM?", remedy)
    for refusal in info.refusals:
        remedy = "requests are served unshared; docs/vllm.md says what is handled"
        yield Check("sharing", State.FAIL, refusal, remedy)
    if info.shares and info.can_move_keys:
        yield Check("sharing", State.OK, "equal prefixes and moved copies")
    elif info.shares:
        remedy = "choose a model with standard RoPE for the rest"
        yield Check("sharing", State.WARN, "equal prefixes only: keys of this model cannot be moved", remedy)
    for warning in info.warnings:
        yield Check("connector", State.WARN, warning)
    yield _check_kvshare(info.versions.get("kvshare", "unknown"))
    yield _check_memory(info)


def _check_kvshare(there: str) -> Check:
    if there != __version__:
        remedy = "install the same version here and there"
        return Check("kvshare", State.WARN, f"{there} in that vLLM, {__version__} here", remedy)
    return Check("kvshare", State.OK, there)


def _check_memory(info: ReplicaInfo) -> Check:
    used, most = info.num_bytes / 2**30, info.max_bytes / 2**30
    detail = f"{used:.2f} of {most:.2f} GiB of KV in {info.num_segments:,} segments"
    if info.max_bytes < info.bytes_per_token * info.max_model_len:
        remedy = "restart it with a larger --kv-bytes"
        return Check("memory", State.WARN, f"{detail}, too little for one prompt of full length", remedy)
    return Check("memory", State.OK, detail)


def _check_settings(settings: Mapping[str, Any]) -> Iterator[Check]:
    """vLLM's settings. One that is not told is not judged."""
    for name, judge in _JUDGES.items():
        if name in settings:
            yield judge(settings[name])
    others = {name: value for name, value in settings.items() if name not in _JUDGES}
    if others:
        detail = ", ".join(f"{name} {value}" for name, value in others.items())
        yield Check("settings", State.OK, detail)


def _policy(policy: object) -> Check:
    if policy == "recompute":
        return Check("policy", State.OK, "KV that is gone is computed")
    detail = f"kv_load_failure_policy is {policy}: a request whose KV is gone would fail"
    remedy = f'{_START}, or give "recompute" in --kv-transfer-config'
    return Check("policy", State.FAIL, detail, remedy)


def _prefix_cache(on: object) -> Check:
    if on:
        return Check("prefixes", State.OK, "vLLM's own prefix cache is on")
    remedy = "start it without --no-enable-prefix-caching"
    return Check("prefixes", State.WARN, "vLLM's own prefix cache is off", remedy)


def _details(on: object) -> Check:
    if on:
        return Check("details", State.OK, "answers tell how many prompt tokens were cached")
    detail = "answers do not tell how many prompt tokens were cached"
    return Check("details", State.WARN, detail, "start it with --enable-prompt-tokens-details")


_JUDGES: Mapping[str, Callable[[object], Check]] = {
    "kv_load_failure_policy": _policy,
    "prefix_caching": _prefix_cache,
    "prompt_tokens_details": _details,
}
"""Settings that sharing depends on; the others are only shown."""


def _probe_details(server: JsonClient, model: str) -> Check:
    """Whether vLLM counts cached tokens in its answers, which only an answer shows."""
    try:
        answer = server.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})
    except KVShareError as exc:
        detail = f"a completion of one token failed: {first_line(exc)}"
        return Check("details", State.WARN, detail, "see the log of that vLLM")
    return _details((answer.get("usage") or {}).get("prompt_tokens_details") is not None)


def _is_locked(error: Exception) -> bool:
    return isinstance(error, AnswerError) and error.status in _LOCKED
