"""What vLLM does with formats, done in a process of its own: it ends or is ended where vLLM would be."""

import ast
import importlib.util
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvshare.errors import UnsupportedFormatError
from kvshare.grammar_pool.pool import GrammarPool
from kvshare.grammar_pool.vllm_formats import leaves_xgrammar

VLLM = importlib.util.find_spec("vllm")
CRASHES = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3}
OTHER_LIBRARY = {"type": "integer", "multipleOf": 3}  # xgrammar does not support it
SLOW_PATTERN = "^(((a{1,100}){1,100}){1,100}){1,100}$"

needs_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[GrammarPool]:
    opened = GrammarPool(lambda: {"kind": "vllm"})
    yield opened
    opened.close()


async def tried(pool: GrammarPool, kind: str, *formats: object, backend: str = "auto") -> None:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in formats]
    request = {"formats": [(kind, text) for text in texts], "backends": [backend]}
    matcher, mask = await pool.compiled(request, key="ann", param="tools")
    matcher.close()
    assert not mask


def both(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties}


@needs_xgrammar
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("kind", "format_", "backend"),
    [
        ("json", {"type": "object", "properties": {"a": {"type": "integer"}}}, "auto"),
        ("json", CRASHES, "auto"),  # xgrammar takes it, so nothing else is asked
        ("json", {"not": {}}, "auto"),  # refused: vLLM says so
        ("json", "[1]", "auto"),
        ("json", both(a=OTHER_LIBRARY), "auto"),
        ("json", {**both(b={"type": "boolean"}), "patternProperties": {"^a": {"type": "boolean"}}}, "auto"),
        ("json", CRASHES, "unknown"),
        ("regex", "(a|b)*", "auto"),
        ("regex", "(", "auto"),
        ("choice", ["yes", "no"], "auto"),
        ("grammar", 'root ::= "a" | "b"', "auto"),
        ("grammar", 'start: "a" | "b"', "auto"),
        ("grammar", "root ::= root", "auto"),
        (
            "structural_tag",
            {
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f"],
            },
            "auto",
        ),
        ("structural_tag", {"triggers": []}, "guidance"),
    ],
)
async def test_what_vllm_compiles_or_refuses_itself_passes(
    pool: GrammarPool, kind: str, format_: object, backend: str
) -> None:
    """Each kind of format, with the library that vLLM chooses for it."""
    await tried(pool, kind, format_, backend=backend)


@needs_xgrammar
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("kind", "format_", "backend"),
    [
        ("json", both(a=CRASHES, b=OTHER_LIBRARY), "auto"),
        ("json", CRASHES, "guidance"),
        ("json", {"type": "array", "minItems": 2**40, "items": {"enum": [1]}}, "auto"),
        ("json", both(a={"type": "string", "pattern": SLOW_PATTERN}), "outlines"),
        (
            "structural_tag",
            {"structures": [{"begin": "<f>", "schema": CRASHES, "end": "</f>"}], "triggers": ["<f"]},
            "guidance",
        ),
    ],
)
async def test_what_would_end_vllm_does_not_reach_it(
    pool: GrammarPool, kind: str, format_: object, backend: str
) -> None:
    """It ends a process of the pool, or grows without limit there."""
    with pytest.raises(UnsupportedFormatError):
        await tried(pool, kind, format_, backend=backend)


@needs_xgrammar
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("formats", [(CRASHES, OTHER_LIBRARY), (OTHER_LIBRARY, {}, CRASHES)])
async def test_what_one_tool_needs_is_tried_with_all(pool: GrammarPool, formats: tuple[object]) -> None:
    """vLLM makes one schema of them, which another library compiles if one tool needs it."""
    with pytest.raises(UnsupportedFormatError):
        await tried(pool, "json", *formats)


_keywords = st.sampled_from(
    [
        ("type", "string"),
        ("type", "integer"),
        ("type", ["array", "object"]),
        ("type", "object"),
        ("type", "array"),
        ("multipleOf", 3),
        ("uniqueItems", True),
        ("contains", {}),
        ("minContains", 1),
        ("format", "date"),
        ("format", "unknown"),
        ("pattern", "a"),
        ("minLength", 1),
        ("maxLength", 5),
        ("propertyNames", {"maxLength": 3}),
        ("propertyNames", {"pattern": "a", "maxLength": 3}),
        ("patternProperties", {"a": {}}),
        ("patternProperties", {"a": {}, "b": {}}),
        ("properties", {"a": {"type": "string"}}),
        ("unevaluatedProperties", False),
        ("allOf", [{}]),
        ("allOf", [{}, {}]),
        ("enum", [1]),
    ]
)


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
@given(st.lists(_keywords, max_size=6).map(dict))
def test_whatever_leaves_xgrammar_in_vllm_does_so_here(schema: dict[str, Any]) -> None:
    """Compared with vLLM's own function, read from its source: importing it takes seconds."""
    if unsupported_in_vllm()(schema):
        assert leaves_xgrammar(schema)


_cache: list[Callable[[dict[str, Any]], bool]] = []


def unsupported_in_vllm() -> Callable[[dict[str, Any]], bool]:
    if not _cache:
        assert VLLM is not None
        assert VLLM.origin is not None
        source = Path(VLLM.origin).parent / "v1" / "structured_output" / "backend_xgrammar.py"
        wanted = {
            "STRING_SUPPORTED_FORMATS",
            "_has_pattern_and_length_bounds",
            "_schema_types",
            "has_xgrammar_unsupported_json_features",
        }
        tree = ast.parse(source.read_text(encoding="utf-8"))
        kept: list[ast.stmt] = [
            node
            for node in tree.body
            if (isinstance(node, ast.FunctionDef) and node.name in wanted)
            or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in wanted)
        ]
        assert len(kept) == len(wanted)
        names: dict[str, Any] = {"Any": Any}
        exec(compile(ast.Module(kept, []), str(source), "exec"), names)
        _cache.append(names["has_xgrammar_unsupported_json_features"])
    return _cache[0]
