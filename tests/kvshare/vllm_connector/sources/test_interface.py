"""The connector and the worker class override what vLLM has, as vLLM calls it. Nothing of it is imported."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.kvshare.vllm_connector.sources.versions import at, sources_of
from tests.kvshare.vllm_connector.sources.vllm_sources import Function, Signature, Sources, text_of

ROOT = Path(__file__).parents[4]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
WORKERS = ("vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker")

# Methods of ours that vLLM does not call, or not yet.
OWN_METHODS = {"attach_model", "forget_segments"}
SINCE_0_33 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


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
        for sources in (sources_of("installed"), sources_of("other"))
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


def test_loads_are_asynchronous_behind_the_forward_pass(sources: Sources) -> None:
    """Both model runners call us in the order that the worker is written for."""
    driver = sources.members(at(sources, "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector"))
    text = ast.unparse(driver["post_forward"].node)
    calls = ["_start_load_kv", "get_transfer_results", "build_connector_worker_meta"]
    places = [text.index(call) for call in calls]
    assert places == sorted(places)
    assert "wait_for_save" in text
