"""The readers of sources find what is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kvshare.vllm_connector.sources.versions import at
from tests.kvshare.vllm_connector.sources.vllm_sources import Function, Signature, Sources


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
