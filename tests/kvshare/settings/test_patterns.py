"""Which patterns a rule may have: no text may make the search for one slow."""

from __future__ import annotations

import pytest

from kvshare.settings.patterns import checked_pattern


@pytest.mark.parametrize(
    "pattern",
    [
        "cch=[0-9a-f]+;",
        "^x-anthropic-billing-header: .*cch=[0-9a-f]+;$",
        r"^(Current|Today.s) (date|time)\b.{0,60}$",
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:?\d{2})?",
        r"(\d{1,3}\.){3}\d{1,3}",
        r"(?i:effort): (?P<level>low|high)(?! again)",
        r"(?<=<effort>)\d+(?=</effort>)",
        "(?>a+)b",
        "(a)?(?(1)b|c)",
        "[(a+)+]",
        r"\(a+\)+",
    ],
)
def test_ordinary_patterns_may_be_used(pattern: str) -> None:
    """Two quantifiers without a bound, groups, alternatives, bounded repetitions, look-around."""
    assert checked_pattern(pattern) == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a*?b)*?c",
        "(a|aa)+b",
        "(?:(?:x+)y?){2,}z",
        "(a{1,64}){1,64}b",
        "(a|bc){600}",
        ".*.*.*x",
        "(?=(a+)+b)a",
        "(a)?(?(1)(b+)+|c)d",
    ],
)
def test_patterns_with_too_many_ways_to_match_are_refused(pattern: str) -> None:
    """Each of them takes longer than anybody waits on some line; the error says what to write instead."""
    with pytest.raises(ValueError, match=r"write \{n,m\}"):
        checked_pattern(pattern)


@pytest.mark.parametrize("pattern", ["", "x*", "^$", "(?=x)", r"\b"])
def test_a_pattern_must_match_some_text(pattern: str) -> None:
    """One that matches nothing would act on every line."""
    with pytest.raises(ValueError, match="at least one character"):
        checked_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{99999999999999}", "(?<=a+)b", "(?P<a>x)(?P<a>y)"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    """With what `re` says about it."""
    with pytest.raises(ValueError, match=r"^expected a regular expression: ."):
        checked_pattern(pattern)
