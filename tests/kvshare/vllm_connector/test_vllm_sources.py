"""
What KVShare uses of vLLM is there, in the vLLM that is installed and in the sources of another version.

Nothing of vLLM is imported: files are read. `make long VLLM=0.33` fetches another version, and names its
folder in KVSHARE_VLLM_SOURCES.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from kvshare.vllm_protocol.messages import RANK_HEADER
from proxy.relay.dialects import DIALECTS
from tests.kvshare.vllm_connector.vllm_sources import (
    Found,
    Function,
    OurFile,
    Signature,
    Sources,
    text_of,
)

ROOT = Path(__file__).parents[3]
VARIABLE = "KVSHARE_VLLM_SOURCES"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
WORKERS = ("vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker")
OURS = sorted((ROOT / "kvshare" / "vllm_connector").rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if " vllm" in path.read_text())

# Methods of ours that vLLM does not call, or not yet.
OWN_METHODS = {"attach_model", "forget_segments"}
SINCE_0_33 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}

ATTENTION, V1 = "vllm.v1.attention.backends", "vllm.v1"
ENTRY, SCHEDULED = "vllm.entrypoints", "vllm.v1.core.sched.output"
SALTED = "cache_salt kv_transfer_params"
WRITES = "do_kv_cache_update forward scale"
WINDOWS = "sliding_window logits_soft_cap sinks"

# Attributes of objects whose class our code does not name: the class, what is read, and the file that does.
ATTRIBUTES = [
    ("vllm.model_executor.layers.attention:Attention", "impl kv_cache", "worker/paged_cache.py"),
    ("vllm.model_executor.layers.attention:Attention", "get_attn_backend", "worker/partial_forward.py"),
    (f"{ATTENTION}.cpu_attn:CPUAttentionBackendImpl", WRITES, "worker/"),
    (f"{ATTENTION}.flash_attn:FlashAttentionImpl", f"{WRITES} {WINDOWS}", "worker/"),
    (f"{ATTENTION}.triton_attn:TritonAttentionImpl", f"{WRITES} {WINDOWS}", "worker/"),
    (f"{ATTENTION}.flashinfer:FlashInferImpl", f"{WRITES} {WINDOWS}", "worker/"),
    (f"{V1}.attention.backend:AttentionBackend", "get_name get_builder_cls", "worker/partial_forward.py"),
    (f"{V1}.attention.backend:AttentionMetadataBuilder", "build", "worker/partial_forward.py"),
    (f"{V1}.kv_cache_interface:KVCacheSpec", "copy_with_new_block_size", "worker/partial_forward.py"),
    (f"{V1}.kv_cache_interface:KVCacheSpec", "block_size", "worker/start.py"),
    (
        "vllm.distributed.parallel_state:GroupCoordinator",
        "world_size rank_in_group cpu_group",
        "worker/ranks.py",
    ),
    (
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase",
        "base _compute_inv_freq _compute_cos_sin_cache",
        "worker/model.py",
    ),
    (f"{BASE}:KVConnectorBase_V1", "_kv_transfer_config _connector_metadata", "connector.py"),
    (f"{V1}.worker.gpu_model_runner:GPUModelRunner", "get_model", "workers.py"),
    (f"{V1}.worker.gpu.model_runner:GPUModelRunner", "get_model", "workers.py"),
    ("vllm.platforms.interface:Platform", "is_cpu is_cuda_alike device_name", "config.py"),
    ("vllm.platforms.interface:Platform", "is_xpu is_sleep_mode_available", "workers.py"),
    ("vllm.platforms.interface:Platform", "device_type", "worker/device.py"),
    ("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory", "_registry", "plugin.py"),
    (
        f"{SCHEDULED}:SchedulerOutput",
        "scheduled_cached_reqs scheduled_new_reqs kv_connector_block_state",
        "scheduler/saving.py",
    ),
    (f"{SCHEDULED}:NewRequestData", "req_id num_computed_tokens", "scheduler/saving.py"),
    (f"{SCHEDULED}:CachedRequestData", "req_ids num_computed_tokens", "scheduler/saving.py"),
    (f"{SCHEDULED}:KVConnectorBlockState", "resolve_block_ids", "scheduler/saving.py"),
]

# What the proxy, its client and the fake vLLM send and read: the class, and its fields.
DOCUMENTS = [
    (f"{ENTRY}.openai.chat_completion.protocol:ChatCompletionRequest", SALTED),
    (f"{ENTRY}.openai.completion.protocol:CompletionRequest", SALTED),
    (f"{ENTRY}.openai.responses.protocol:ResponsesRequest", SALTED),
    (f"{ENTRY}.anthropic.protocol:AnthropicMessagesRequest", SALTED),
    (f"{ENTRY}.serve.tokenize.protocol:TokenizeResponse", "tokens"),
    (f"{ENTRY}.scale_out.token_in_token_out.protocol:GenerateRequest", "token_ids features"),
    (f"{ENTRY}.serve.engine.protocol:PromptTokenUsageInfo", "cached_tokens"),
]

# Routes that a later version added under /v1, and their bodies' class: the proxy relays them with a salt.
ROUTES_SINCE_0_33 = {"/v1/decisions": f"{ENTRY}.openai.decisions.protocol:DecisionRequest"}


def installed() -> Path | None:
    spec = util.find_spec("vllm")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else None


_trees: dict[str, Sources] = {}


@pytest.fixture(params=["installed", "other"])
def sources(request: pytest.FixtureRequest) -> Sources:
    """The vLLM that is installed, and the one whose sources were fetched."""
    return _tree(request.param)


def _tree(which: str) -> Sources:
    root = installed() if which == "installed" else Path(os.environ.get(VARIABLE) or "none")
    if root is None or not (root / "vllm" / "__init__.py").is_file():
        wanted = "vLLM is not installed" if which == "installed" else f"{VARIABLE} names no folder with vLLM"
        pytest.skip(f"{wanted}: `make long VLLM=0.33` fetches the sources of another version")
    return _trees.setdefault(str(root), Sources(root))


def at(sources: Sources, place: str) -> Found:
    module, _, name = place.partition(":")
    found = sources.find(module, name)
    assert found is not None, f"{module} has no {name}"
    return found


_read = cache(OurFile)


def files(paths: list[Path]) -> Iterator[OurFile]:
    for path in paths:
        yield _read(path, ROOT)


@pytest.mark.parametrize("paths", [OURS, TESTS], ids=["connector", "tests"])
def test_every_import_is_there(sources: Sources, paths: list[Path]) -> None:
    """Also those of the tests and their fakes."""
    uses = [use for file in files(paths) for use, _ in file.imports]
    assert len(uses) > 20
    missing = [
        use
        for use in uses
        if (sources.find(use.module, use.name) if use.name else sources.module(use.module)) is None
    ]
    assert missing == []


@pytest.mark.parametrize("paths", [OURS, TESTS], ids=["connector", "tests"])
def test_every_call_fits(sources: Sources, paths: list[Path]) -> None:
    """Of functions and classes that are imported: no name is unknown, and nothing is missing."""
    problems, num_checked = [], 0
    for file in files(paths):
        for use, call in file.calls():
            found = sources.find(use.module, use.name)
            if found is None or not isinstance(found.node, ast.ClassDef | Function):
                continue
            num_checked += 1
            if (problem := sources.signature(found).problem(call)) is not None:
                problems.append(f"{use.where}: {use.name} {problem}")
    assert num_checked > 5
    assert problems == []


def test_every_attribute_of_a_named_class_is_there(sources: Sources) -> None:
    """Of parameters that are annotated with a class of vLLM, and of what these have."""
    missing, owners = [], set()
    for file in files(OURS):
        for where, owner, name in file.reads(sources):
            assert isinstance(owner.node, ast.ClassDef)
            owners.add(owner.node.name)
            if name not in sources.members(owner):
                missing.append(f"{where}: {owner.node.name}.{name}")
    assert owners >= {"VllmConfig", "ModelConfig", "ParallelConfig", "Request", "SchedulerOutput"}
    assert missing == []


@pytest.mark.parametrize(("place", "names", "where"), ATTRIBUTES)
def test_every_other_attribute_is_there(sources: Sources, place: str, names: str, where: str) -> None:
    """Those that cannot be derived are in a table, with the file that reads them."""
    members = sources.members(at(sources, place))
    assert [name for name in names.split() if name not in members] == []
    text = "".join(path.read_text() for path in OURS if where in path.as_posix())
    assert [name for name in names.split() if not re.search(rf"\b{name}\b", text)] == []


def class_of_ours(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((ROOT / "kvshare" / "vllm_connector" / file).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def methods(node: ast.ClassDef) -> dict[str, Function]:
    return {each.name: each for each in node.body if isinstance(each, Function)}


def test_every_method_of_the_connector_can_be_called_as_vllm_does(sources: Sources) -> None:
    """Names and order of the parameters are vLLM's; what it does not give is not needed."""
    bases = {
        **sources.members(at(sources, f"{BASE}:SupportsHMA")),
        **sources.members(at(sources, f"{BASE}:KVConnectorBase_V1")),
    }
    unknown, problems = set(), []
    for name, ours in methods(class_of_ours("connector.py", "KVShareConnector")).items():
        theirs = bases.get(name)
        if theirs is None:
            unknown.add(name)
        elif isinstance(theirs.node, Function):
            problem = Signature.of(theirs.node).problem_of_override(Signature.of(ours))
            problems += [f"{name}: {problem}"] if problem else []
    own = {name for name in unknown if not name.startswith("_")}
    assert own - SINCE_0_33 == OWN_METHODS
    assert own & SINCE_0_33 in (set(), SINCE_0_33)
    assert problems == []


def test_every_abstract_method_is_implemented(sources: Sources) -> None:
    members = sources.members(at(sources, f"{BASE}:KVConnectorBase_V1")) | sources.members(
        at(sources, f"{BASE}:SupportsHMA")
    )
    abstract = {
        name
        for name, found in members.items()
        if isinstance(found.node, Function)
        and any("abstractmethod" in ast.unparse(each) for each in found.node.decorator_list)
    }
    assert len(abstract) > 5
    assert abstract <= set(methods(class_of_ours("connector.py", "KVShareConnector")))


@pytest.mark.parametrize("place", WORKERS)
def test_every_method_of_the_worker_class_is_one_of_vllms(sources: Sources, place: str) -> None:
    members = sources.members(at(sources, place))
    for name, ours in methods(class_of_ours("workers.py", "KVShareWorker")).items():
        assert name in members, f"{place} has no {name}"
        theirs = members[name].node
        assert isinstance(theirs, Function)
        assert Signature.of(theirs).problem_of_override(Signature.of(ours)) is None


def test_a_new_method_of_connectors_is_decided_on() -> None:
    """Its default may be wrong for us, as that of `supports_sleep_mode` would be."""
    first, second = (
        set(sources.members(at(sources, f"{BASE}:KVConnectorBase_V1")))
        for sources in (_tree("installed"), _tree("other"))
    )
    ours = set(methods(class_of_ours("connector.py", "KVShareConnector")))
    assert second - first <= SINCE_0_33
    assert second - first <= ours
    assert first - second == set()


def test_the_metadata_builder_is_made_as_we_make_it(sources: Sources) -> None:
    """`get_builder_cls()(spec, layer names, config, device)`, and `build(0, metadata)`."""
    builder = sources.members(at(sources, "vllm.v1.attention.backend:AttentionMetadataBuilder"))
    for name, call in (("__init__", "f(1, 2, 3, 4)"), ("build", "f(0, metadata)")):
        node, made = builder[name].node, ast.parse(call, mode="eval").body
        assert isinstance(node, Function)
        assert isinstance(made, ast.Call)
        assert Signature.of(node).without_first.problem(made) is None


def test_the_entry_point_is_one_that_vllm_reads(sources: Sources) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (group,) = (name for name in project["entry-points"] if name.startswith("vllm."))
    assert f'"{group}"' in text_of(sources.root, "vllm/plugins")


def test_every_option_that_is_passed_exists(sources: Sources) -> None:
    """Those that `kvshare vllm` adds to the command, which are fields or arguments of vLLM's."""
    from kvshare.cli import vllm_command

    options = vllm_command.connector_options(host="127.0.0.1", port=1, max_bytes=1)
    passed = {each for each in options if each.startswith("--")}
    passed |= {vllm_command._RENDERS, vllm_command._ONE_GROUP}
    assert len(passed) == 5
    text = text_of(sources.root, "vllm/engine") + text_of(sources.root, "vllm/entrypoints")
    for option in passed:
        field = option.removeprefix("--").replace("-", "_")
        assert f'"{option}"' in text or re.search(rf"^    {field}: ", text, re.MULTILINE), option


def test_every_field_of_the_connectors_settings_exists(sources: Sources) -> None:
    """The JSON behind `--kv-transfer-config`."""
    import json

    from kvshare.cli import vllm_command

    options = vllm_command.connector_options(host="127.0.0.1", port=1, max_bytes=1)
    document: dict[str, Any] = json.loads(options[options.index("--kv-transfer-config") + 1])
    fields = sources.members(at(sources, "vllm.config.kv_transfer:KVTransferConfig"))
    assert set(document) <= set(fields)
    assert '"recompute"' in ast.unparse(fields["kv_load_failure_policy"].node).replace("'", '"')


def routes(sources: Sources) -> set[str]:
    """All paths in decorators of vLLM's API, and those that are added by name."""
    found = re.findall(r"""["'](/[a-z0-9_/{}:.]*)["']""", text_of(sources.root, "vllm/entrypoints"))
    return set(found)


def test_every_route_that_is_called_exists(sources: Sources) -> None:
    client = (ROOT / "kvshare" / "fleet" / "client.py").read_text()
    checks = (ROOT / "kvshare" / "cli" / "server_checks.py").read_text()
    called = set(re.findall(r'"(/(?:v1/)?[a-z/]+)"', client + checks))
    called -= {"/info", "/segments", "/drop"}  # the connector's own, not vLLM's
    called = {path for path in called if not path.startswith("/admin")}
    called |= set(DIALECTS) | {f"{path}/render" for path in DIALECTS}
    assert called >= {"/tokenize", "/health", "/version", "/v1/models"}
    assert called - routes(sources) == set()
    text = text_of(sources.root, "vllm/entrypoints")
    assert RANK_HEADER in text


def test_a_new_route_is_decided_on() -> None:
    """The proxy relays what is under /v1, and adds a `cache_salt` to bodies: they must know it."""
    first, second = (
        {path for path in routes(_tree(name)) if path.startswith("/v1/") and path != "/v1/"}
        for name in ("installed", "other")
    )
    assert second - first <= set(ROUTES_SINCE_0_33)
    for path in second - first:
        assert "cache_salt" in _tree("other").members(at(_tree("other"), ROUTES_SINCE_0_33[path]))


@pytest.mark.parametrize(("place", "fields"), DOCUMENTS)
def test_every_field_that_is_sent_or_read_exists(sources: Sources, place: str, fields: str) -> None:
    members = sources.members(at(sources, place))
    assert [name for name in fields.split() if name not in members] == []


def test_every_metric_that_is_read_exists(sources: Sources) -> None:
    """prometheus_client adds `_total` and `_count`."""
    text = "".join(path.read_text() for path in (ROOT / "lab" / "src" / "kvshare_lab" / "vllm").glob("*.py"))
    named = set(re.findall(r'"(vllm:\w+)"', text))
    assert len(named) >= 3
    exported = text_of(sources.root, "vllm/v1/metrics")
    for name in named:
        bare = name.removesuffix("_count").removesuffix("_total").removesuffix("_info")
        assert any(f'"{each}' in exported for each in (name, bare)), name


def test_loads_are_asynchronous_behind_the_forward_pass(sources: Sources) -> None:
    """Both model runners call us in the order that the worker is written for."""
    driver = sources.members(at(sources, "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector"))
    text = ast.unparse(driver["post_forward"].node)
    calls = ["_start_load_kv", "get_transfer_results", "build_connector_worker_meta"]
    places = [text.index(call) for call in calls]
    assert places == sorted(places)
    assert "wait_for_save" in text


class TestReading:
    """The readers find what is wrong."""

    @pytest.fixture
    def written(self, tmp_path: Path) -> Sources:
        package = tmp_path / "vllm"
        package.mkdir()
        (package / "__init__.py").write_text('MODULE_ATTRS = {"LLM": ".inner:Other"}\n')
        (package / "inner.py").write_text(
            "from .base import Base as Parent\n"
            "class Other(Parent):\n"
            "    own: int\n"
            "    def act(self, a, b=1, *, c): self.seen = a\n"
        )
        (package / "base.py").write_text("class Base:\n    inherited: int = 0\n")
        return Sources(tmp_path)

    def test_names_through_other_modules(self, written: Sources) -> None:
        for place in ("vllm.inner:Parent", "vllm:LLM", "vllm:inner"):
            assert at(written, place)
        assert written.find("vllm.inner", "Missing") is None
        assert written.find("vllm.missing", "Other") is None

    def test_members_of_bases_and_of_self(self, written: Sources) -> None:
        assert set(written.members(at(written, "vllm.inner:Other"))) == {"own", "act", "seen", "inherited"}

    @pytest.mark.parametrize(
        ("call", "problem"),
        [
            ("f(1, c=2)", None),
            ("f(*x, **y)", None),
            ("f(1)", "needs c"),
            ("f(1, 2, 3, c=4)", "takes 2"),
            ("f(1, c=2, d=3)", "does not know d"),
        ],
    )
    def test_calls(self, written: Sources, call: str, problem: str | None) -> None:
        node = written.members(at(written, "vllm.inner:Other"))["act"].node
        made = ast.parse(call, mode="eval").body
        assert isinstance(node, Function)
        assert isinstance(made, ast.Call)
        found = Signature.of(node).without_first.problem(made)
        assert (found is None) if problem is None else (problem in str(found))

    @pytest.mark.parametrize(
        ("ours", "fits"),
        [
            ("def act(self, a, b=2, *, c): ...", True),
            ("def act(self, a, b=2, *, c, d=1): ...", True),
            ("def act(self, b, a=2, *, c): ...", False),
            ("def act(self, a): ...", False),
            ("def act(self, a, b=2, *, c, d): ...", False),
        ],
    )
    def test_overrides(self, written: Sources, ours: str, fits: bool) -> None:
        theirs, (own,) = written.members(at(written, "vllm.inner:Other"))["act"].node, ast.parse(ours).body
        assert isinstance(theirs, Function)
        assert isinstance(own, Function)
        assert (Signature.of(theirs).problem_of_override(Signature.of(own)) is None) is fits
