"""
Tries what vLLM will do with the format of an answer, in a process that may end of it.

vLLM compiles in the processes that all requests share, without limits, and chooses the library by itself:
`xgrammar`; for what that refuses or supports in part `llguidance`; or `outlines`, for what that does not
support either (`_validate_structured_outputs` in vllm/sampling_params.py, 0.32). What a library refuses is
for vLLM to say: here it matters only whether a process ends, or does not come to an end.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import string
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

# Formats of strings that xgrammar follows.
_FORMATS = frozenset(
    """
    email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer
    relative-json-pointer
    """.split()  # noqa: SIM905  names, one after the other, read best so
)
_LENGTHS = ("minLength", "maxLength")
_OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains")
_END = "</s>"

_Compile = Callable[[str, str], None]  # what gets a kind and a text


def has_xgrammar() -> bool:
    """Return whether formats are tried with what vLLM tries first; if not, with llguidance only."""
    return importlib.util.find_spec("xgrammar") is not None


class VllmFormats:
    """Compiles as vLLM does, for a vocabulary as large as a model's, which is what takes long."""

    def __init__(self) -> None:
        self._vocabulary = list(_vocabulary())
        self._libraries: dict[str, _Compile] = {}
        for name, (module, compile_) in {
            "xgrammar": ("xgrammar", self._xgrammar),
            "guidance": ("llguidance", self._llguidance),
            "outlines": ("outlines_core", self._outlines),
        }.items():
            if importlib.util.find_spec(module) is not None:
                self._libraries[name] = compile_
        with suppress(ImportError):  # read once, before processes are forked
            _ = self._ll_tokenizer
            _ = self._xgrammar_tokens

    def compile(self, request: Mapping[str, Any]) -> None:
        """`request`: `formats`, pairs of kind and text; `backends`: of `--structured-outputs-config`."""
        tried: dict[str, set[_Compile]] = {text: set() for kind, text in request["formats"] if kind == "json"}
        for kind, text in request["formats"]:
            for backend in request["backends"]:
                for library in self._chosen(kind, text, backend):
                    _try(library, kind, text)
                    tried.get(text, set()).add(library)
        # vLLM joins the schemas of tools to one: what it chooses for one of them compiles all.
        chosen = set().union(*tried.values())
        for text, libraries in tried.items():
            for library in chosen - libraries:
                _try(library, "json", text)

    def _chosen(self, kind: str, text: str, backend: str) -> Iterator[_Compile]:
        """Yield the libraries that vLLM will compile this with."""
        if backend in self._libraries:
            yield self._libraries[backend]
            return
        if "xgrammar" in self._libraries:
            try:
                self._xgrammar(kind, text)
            except Exception:  # noqa: BLE001  whatever it is, vLLM tries the next one
                leaves = True
            else:
                leaves = kind == "json" and any(map(leaves_xgrammar, _objects(text)))
            if not leaves:
                return
        by_outlines = kind == "json" and any("patternProperties" in each for each in _objects(text))
        if (name := "outlines" if by_outlines else "guidance") in self._libraries:
            yield self._libraries[name]

    def _xgrammar(self, kind: str, text: str) -> None:
        library = self._xgrammar_library
        compiler = library.GrammarCompiler(self._xgrammar_tokens, max_threads=2, cache_enabled=False)
        match kind:
            case "json":
                library.Grammar.from_json_schema(text)
                compiler.compile_json_schema(text)
            case "regex":
                library.Grammar.from_regex(text)
                compiler.compile_regex(text)
            case "choice":
                options = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
                compiler.compile_grammar(f"root ::= {options}")
            case "grammar" if "::=" in text:
                library.Grammar.from_ebnf(text)
                compiler.compile_grammar(text)
            case "grammar":
                library.Grammar.from_lark(text)
                compiler.compile_lark(text)
            case _:
                library.Grammar.from_structural_tag(text)
                compiler.compile_structural_tag(text)

    def _llguidance(self, kind: str, text: str) -> None:
        import llguidance

        match kind:
            case "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
            case "structural_tag":
                tag = json.loads(text)
                for part in tag["structures"]:  # they are compiled when an answer gets there
                    self._llguidance("json", json.dumps(part["schema"]))
                grammar = _tagged(tag, llguidance)
            case _:
                grammar = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]  # one of its formats
        llguidance.LLMatcher.validate_grammar(grammar, None)
        matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()

    def _outlines(self, kind: str, text: str) -> None:
        outlines_core = importlib.import_module("outlines_core")  # ships no types
        schema = importlib.import_module("outlines_core.json_schema")
        match kind:
            case "json":
                regex = schema.build_regex_from_schema(text)
            case "regex":
                regex = text
            case _:
                return  # vLLM gives it nothing else
        ids: dict[str | bytes, list[int]] = {token: [i] for i, token in enumerate(self._vocabulary)}
        outlines_core.Index(regex, outlines_core.Vocabulary(len(self._vocabulary), ids))

    @cached_property
    def _xgrammar_library(self) -> types.SimpleNamespace:
        """
        Return those parts of xgrammar that compile. Raises ImportError.

        Its package imports torch and transformers for other parts, which takes half a gigabyte and seconds.
        So its modules are imported without its `__init__`, and with an empty module instead of transformers.
        """
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # so that importing it fails at once
        sys.modules.setdefault("transformers", _Empty("transformers"))
        spec = importlib.util.find_spec("xgrammar")
        if spec is None:
            raise ImportError("xgrammar is not installed")
        sys.modules["xgrammar"] = importlib.util.module_from_spec(spec)
        importlib.import_module("xgrammar.load_binding")
        compiler = importlib.import_module("xgrammar.compiler")
        return types.SimpleNamespace(
            Grammar=importlib.import_module("xgrammar.grammar").Grammar,
            GrammarCompiler=compiler.GrammarCompiler,
            TokenizerInfo=importlib.import_module("xgrammar.tokenizer_info").TokenizerInfo,
        )

    @cached_property
    def _xgrammar_tokens(self) -> Any:
        end = len(self._vocabulary)
        return self._xgrammar_library.TokenizerInfo([*self._vocabulary, _END], stop_token_ids=[end])

    @cached_property
    def _ll_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        end = len(self._vocabulary)
        return LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]  # its types lack it
            encoder={token: number for number, token in enumerate(self._vocabulary)},
            special_tokens={_END: end},
            pattern=r"\w+|\W+",
            eos_token=end,
            n_vocab=end + 1,
        )


def _try(library: _Compile, kind: str, text: str) -> None:
    with suppress(Exception):  # whatever they say: vLLM says it too, where the client reads it
        library(kind, text)


def _vocabulary() -> Iterator[bytes]:
    """About 40,000 tokens, as many as a small model has: all bytes, short words, numbers, pieces of JSON."""
    yield from (bytes([byte]) for byte in range(256))
    words = (
        "".join(letters) for n in (2, 3) for letters in itertools.product(string.ascii_lowercase, repeat=n)
    )
    for word in words:
        yield word.encode()
        yield f" {word}".encode()
    yield from (f"{number}".encode() for number in range(10, 1000))
    yield from (
        "".join(marks).encode() for n in (2, 3) for marks in itertools.product('{}[]",: \n', repeat=n)
    )


def _objects(schema: str) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a JSON text, from the outside."""
    waiting: list[Any] = [json.loads(schema)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def leaves_xgrammar(schema: Mapping[str, Any]) -> bool:
    """
    Return whether vLLM does not give xgrammar a schema that has this object.

    Source: `has_xgrammar_unsupported_json_features` in vllm/v1/structured_output/backend_xgrammar.py

    Types are not looked at, so that it is true more often than for vLLM, never less often.
    """
    return (
        "multipleOf" in schema
        or any(key in schema for key in _OF_ARRAYS)
        or ("format" in schema and str(schema["format"]) not in _FORMATS)
        or _has_pattern_and_length(schema)
        or ("propertyNames" in schema and _leaves_by_names(schema))
        or _leaves_by_patterns(schema)
        or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1)
    )


def _has_pattern_and_length(schema: Mapping[str, Any]) -> bool:
    return ("pattern" in schema or "format" in schema) and any(key in schema for key in _LENGTHS)


def _leaves_by_names(schema: Mapping[str, Any]) -> bool:
    names = schema["propertyNames"]
    return any(key in schema for key in ("patternProperties", "properties", "unevaluatedProperties")) or (
        isinstance(names, Mapping) and _has_pattern_and_length(names)
    )


def _leaves_by_patterns(schema: Mapping[str, Any]) -> bool:
    patterns = schema.get("patternProperties")
    return isinstance(patterns, Mapping) and ("properties" in schema or len(patterns) > 1)


def _tagged(tag: Mapping[str, Any], llguidance: types.ModuleType) -> str:
    """Return the older form of structural tags, which is the only one that vLLM gives to llguidance."""
    tags = [
        llguidance.StructTag(
            trigger=next(each for each in tag["triggers"] if part["begin"].startswith(each)),
            begin=part["begin"],
            grammar=llguidance.LLMatcher.grammar_from_json_schema(json.dumps(part["schema"])),
            end=part["end"],
        )
        for part in tag["structures"]
    ]
    grammar: str = llguidance.StructTag.to_grammar(tags)
    return grammar


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
