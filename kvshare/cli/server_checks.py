"""
`kvshare doctor` on a running vLLM: is it up, does it run KVShare's connector, and is it set up as it must be.

Asks vLLM's own routes and the connector's control server. It computes one token, changes no setting and reads
nothing of what others asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvshare import __version__
from kvshare.addresses import SERVER_NAME
from kvshare.cli.check import Check, Checked
from kvshare.cli.checks import first_line
from kvshare.cli.client import AnswerError, JsonClient
from kvshare.errors import KVShareError, UnreachableError, UpstreamError, WrongServerError
from kvshare.fleet.client import API_KEY_VARIABLE, NO_ROUTE, ControlClient
from kvshare.grammar_pool.vllm_formats import has_xgrammar
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import PROTOCOL
from kvshare.vllm_protocol.replica_info import ReplicaInfo
from kvshare.vllm_protocol.versions import TESTED, only_read, untested

if TYPE_CHECKING:
    from kvshare.settings import ReplicaSettings

_LOCKED = (401, 403)
_IS_VLLM = "is that a vLLM?"
_ADDRESS = "the connector's address: --vllm-control-url, or control_url in the config"
_GIVE_CONNECTOR = f"start it with `kvshare vllm MODEL`, or give {_ADDRESS}"


def check_replicas(replicas: Sequence[ReplicaSettings]) -> list[Check]:
    """Return the findings of each vLLM that the settings name."""
    if not replicas:
        problem = "engine.kind is vllm, and vllm.replicas names none"
        return [Checked.VLLM.fail(problem, "start it with `kvshare vllm MODEL`, and add its address")]
    checks = (check_vllm(each.url, [rank.control for rank in each.ranks]) for each in replicas)
    return list(chain.from_iterable(checks))


def check_formats() -> Check:
    """Check with which libraries the proxy tries formats of answers before vLLM gets them."""
    if has_xgrammar():
        return Checked.FORMATS.ok("tried with xgrammar and llguidance before vLLM gets them")
    return Checked.FORMATS.warn(
        "of answers are tried with llguidance only before vLLM gets them: xgrammar is not installed here",
        "pip install xgrammar, in the version that vLLM has",
    )


def check_vllm(url: str, control_urls: Sequence[str]) -> list[Check]:
    """vLLM's own findings, then those of each rank's connector; without those whose answer did not come."""
    server = JsonClient(url, key=os.environ.get(API_KEY_VARIABLE))
    checks, models = _check_server(server, url)
    if models:
        checks.append(_probe_render(server, str(models[0]["id"])))
    infos = []
    for control_url in control_urls:
        info, answers = asyncio.run(_check_control(control_url))
        checks.append(answers)
        if info is not None:
            checks += _check_info(info, models)
            infos.append(info)
    if infos:  # what all ranks report alike
        checks += _check_ranks(infos[0].data_parallel_size, len(control_urls))
        checks += _check_settings(infos[0].settings)
    if models and (not infos or "prompt_tokens_details" not in infos[0].settings):
        checks.append(_probe_details(server, str(models[0]["id"])))
    return checks


def _check_ranks(size: int, num_configured: int) -> Iterator[Check]:
    """Check whether all ranks are looked at; one too many has been found silent."""
    if size > num_configured:
        yield Checked.RANKS.warn(
            f"this vLLM has {size} data-parallel ranks, {num_configured} are checked: the others would get "
            "no requests",
            f"give --vllm-data-parallel-size {size}, here and for `kvshare serve`, or "
            f"data_parallel_size: {size} in vllm.replicas",
        )
    elif size > 1:
        yield Checked.RANKS.ok(f"{size} data-parallel ranks, each with its own KV")


def _check_server(server: JsonClient, url: str) -> tuple[list[Check], Sequence[Mapping[str, Any]]]:
    """Check what vLLM says of itself, and which models it serves."""
    try:
        server.send("/health")
    except UnreachableError as exc:
        remedy = "start it with `kvshare vllm MODEL`, or correct the address"
        return [Checked.VLLM.fail(f"{url}: {exc.problem}", remedy)], ()
    except AnswerError as exc:
        return [Checked.VLLM.fail(f"/health: {exc.status} {exc.message}", "restart this vLLM")], ()
    if server.server_name == SERVER_NAME:
        remedy = "give the address of a vLLM that `kvshare vllm MODEL` has started"
        return [Checked.VLLM.fail(f"{url} is a KVShare server", remedy)], ()
    checks = [Checked.VLLM.ok(f"{url} is healthy"), _check_version(server)]
    try:
        models = server.call("/v1/models")["data"]
        names = ", ".join(str(model["id"]) for model in models)
    except (KVShareError, KeyError, TypeError) as exc:
        locked = isinstance(exc, AnswerError) and exc.status in _LOCKED
        remedy = "set KVSHARE_VLLM_API_KEY to its --api-key" if locked else _IS_VLLM
        return [*checks, Checked.MODELS.fail(f"/v1/models: {first_line(exc)}", remedy)], ()
    return [*checks, Checked.MODELS.ok(names)], models


def _check_version(server: JsonClient) -> Check:
    try:
        version = str(server.call("/version")["version"])
    except (KVShareError, KeyError) as exc:
        return Checked.VERSION.fail(f"/version: {first_line(exc)}", _IS_VLLM)
    if (reason := untested(version)) is not None:
        return Checked.VERSION.warn(reason, f"install vllm{','.join(TESTED)}")
    if (reason := only_read(version)) is not None:
        return Checked.VERSION.warn(reason, f"vllm{','.join(TESTED)} was run")
    return Checked.VERSION.ok(version)


async def _check_control(url: str) -> tuple[ReplicaInfo | None, Check]:
    """Check whether the connector answers. Returns what it says of itself."""
    try:
        async with ControlClient(url) as control:
            info = await control.info()
    except WrongServerError as exc:
        return None, Checked.CONTROL.fail(
            exc,
            "a server's --port must not be the connector's: give that server another one, or the "
            "connector's address with --vllm-control-url, or control_url in the config",
        )
    except UpstreamError as exc:
        if isinstance(exc.__cause__, WireError):
            return None, Checked.PROTOCOL.fail(
                exc.__cause__, "install the same kvshare here and there, and restart this vLLM"
            )
        if exc.status in _LOCKED:
            remedy = "set KVSHARE_VLLM_TOKEN to what this vLLM was started with"
        elif exc.status is None:
            remedy = f"no connector, or on another port: {_GIVE_CONNECTOR}"
        else:
            remedy = f"is that the connector's port? {_GIVE_CONNECTOR}"
        return None, Checked.CONTROL.fail(exc, remedy)
    return info, Checked.CONTROL.ok(f"{url}, protocol {PROTOCOL}")


def _check_info(info: ReplicaInfo, models: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check what the connector says of its model, its limits and its memory."""
    served = {str(model.get(name)) for model in models for name in ("id", "root")}
    if served and info.model not in served:
        yield Checked.MODEL.warn(f"the connector's is {info.model}: another vLLM?", f"give {_ADDRESS}")
    for refusal in info.refusals:
        yield Checked.SHARING.fail(refusal, "requests are served unshared; docs/vllm.md says what is handled")
    if info.passing:
        yield Checked.SHARING.warn(
            info.passing, "requests pass unshared, equal prefixes from vLLM's own cache; see docs/vllm.md"
        )
    if info.shares:
        yield _check_sharing(info)
    for warning in info.warnings:
        yield Checked.CONNECTOR.warn(warning, "")  # it says itself what to do
    if info.disk_problem.reason:
        yield Checked.CONNECTOR.warn(
            f"KV is not written to its disk: {info.disk_problem.reason}",
            "free space at its --disk, or correct the permissions there; without --disk look at the "
            "store of its --shared-tier; after a reset of its cache, start that vLLM again",
        )
    there = info.versions.get("kvshare", "unknown")
    if there == __version__:
        yield Checked.KVSHARE.ok(there)
    else:
        versions = f"{there} in that vLLM, {__version__} here"
        yield Checked.KVSHARE.warn(versions, "install the same version here and there")
    yield _check_memory(info)


def _check_sharing(info: ReplicaInfo) -> Check:
    if info.can_move_keys:
        return Checked.SHARING.ok("equal prefixes and moved copies")
    return Checked.SHARING.warn(
        "only text at the same position: keys of this model cannot be moved",
        "the line below names the layer; on a CPU try --dtype float32, else choose a model with standard "
        "RoPE for the rest",
    )


def _check_memory(info: ReplicaInfo) -> Check:
    used, most = info.num_bytes / 2**30, info.max_bytes / 2**30
    kept = f"{used:.2f} of {most:.2f} GiB of KV in {info.num_segments:,} segments"
    if info.max_bytes < info.bytes_per_token * info.max_model_len:
        too_small = f"{kept}, too little for one prompt of full length"
        return Checked.MEMORY.warn(too_small, "restart it with a larger --kv-bytes")
    return Checked.MEMORY.ok(kept)


def _check_settings(settings: Mapping[str, Any]) -> Iterator[Check]:
    """vLLM's settings, of those that the connector reports."""
    for name, check in _JUDGED.items():
        if name in settings:
            yield check(settings[name])
    others = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in _JUDGED)
    if others:
        yield Checked.SETTINGS.ok(others)


def _check_policy(value: object) -> Check:
    if value == "recompute":
        return Checked.POLICY.ok("KV that is gone is computed")
    return Checked.POLICY.fail(
        f"kv_load_failure_policy is {value}: a request whose KV is gone would fail",
        'start it with `kvshare vllm MODEL`, or give "recompute" in --kv-transfer-config',
    )


def _check_prefixes(value: object) -> Check:
    if value is True:
        return Checked.PREFIXES.ok("vLLM's own prefix cache is on")
    return Checked.PREFIXES.warn(
        "vLLM's own prefix cache is off", "start it without --no-enable-prefix-caching"
    )


def _check_details(value: object) -> Check:
    if value is True:
        return Checked.DETAILS.ok("answers say how many prompt tokens were cached")
    return Checked.DETAILS.warn(
        "answers do not say how many prompt tokens were cached",
        "start it with --enable-prompt-tokens-details",
    )


_JUDGED: Mapping[str, Callable[[object], Check]] = {
    "kv_load_failure_policy": _check_policy,
    "prefix_caching": _check_prefixes,
    "prompt_tokens_details": _check_details,
}
"""Settings of vLLM that sharing depends on. Others are only shown."""


def _probe_render(server: JsonClient, model: str) -> Check:
    """Check for vLLM's `/render` routes, by which requests other than chats are planned."""
    try:
        server.send("/v1/completions/render", body={"model": model, "prompt": "a", "max_tokens": 1})
    except KVShareError as exc:
        is_missing = isinstance(exc, AnswerError) and exc.status in NO_ROUTE
        problem = f"/v1/completions/render: {first_line(exc)}"
        if not is_missing:
            return Checked.RENDER.warn(problem, "see the log of that vLLM")
        return Checked.RENDER.warn(
            f"{problem}: /v1/responses and /v1/messages are not shared",
            "start it with `kvshare vllm MODEL`, or with --enable-scale-out",
        )
    return Checked.RENDER.ok("vLLM says what tokens a request has, on every route")


def _probe_details(server: JsonClient, model: str) -> Check:
    """Check whether vLLM counts cached tokens in its answers, which only an answer shows."""
    try:
        answer = server.call("/v1/completions", body={"model": model, "prompt": "a", "max_tokens": 1})
    except KVShareError as exc:
        return Checked.DETAILS.warn(
            f"a completion of one token failed: {first_line(exc)}", "see the log of that vLLM"
        )
    reported = (answer.get("usage") or {}).get("prompt_tokens_details") is not None
    return _check_details(reported)
