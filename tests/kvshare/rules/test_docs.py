"""What docs/rules.md and config.yaml show can be pasted, and does what they say."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import yaml

from kvshare.rules.rewrite import apply_rules
from kvshare.rules.texts import CHAT
from kvshare.settings import RuleSettings, load_settings

_ROOT = Path(__file__).parents[3]
_TOP = """You are an agent.
x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={hexadecimal};
Current time: {minute} minutes past ten
session_id={hexadecimal}
Working directory: /tmp/{hexadecimal}
Reasoning effort: high{minute}
now 2026-11-23T12:{minute}:00Z
"""
_REST = "A lot that is always the same."


def rules_in(text: str) -> tuple[RuleSettings, ...]:
    return load_settings(overrides=yaml.safe_load(text)).rules


def system_behind(rules: tuple[RuleSettings, ...], hexadecimal: str, minute: int) -> str:
    top = _TOP.format(hexadecimal=hexadecimal, minute=minute)
    messages = [{"role": "system", "content": top + _REST}, {"role": "user", "content": "Go on."}]
    found = apply_rules(rules, {"messages": messages}, CHAT)
    assert found.rules == tuple(rule.name for rule in rules)
    text: str = found.body["messages"][0]["content"]
    return text


def test_the_examples_of_the_documentation_make_prompts_alike() -> None:
    """With all of them the system's text is the same whatever nonce and clock say."""
    blocks = re.findall(r"```yaml\n(.*?)```", (_ROOT / "docs" / "rules.md").read_text("utf-8"), re.DOTALL)
    rules = tuple(rule for block in blocks for rule in rules_in(block))
    assert len(rules) == 6
    texts = {system_behind(rules, f"{number:08x}", 10 + number) for number in (1, 255)}
    assert len(texts) == 1
    assert texts.pop().endswith(_REST)


def test_the_examples_in_config_yaml_are_rules() -> None:
    """They stand behind comment signs, as none is on by default."""
    lines = (_ROOT / "config.yaml").read_text("utf-8").splitlines()
    indented = [line.partition("#")[2][1:] for line in lines if re.match(r" +# {3}[ -]", line)]
    assert [rule.name for rule in rules_in("rules:\n" + dedent("\n".join(indented)))] == [
        "billing-nonce",
        "clock",
    ]
