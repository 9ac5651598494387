"""The `llm` command: prompts, streams, schemas, tools, as its OpenAI-compatible models are set up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import IS_EMBEDDED, MODEL, URL


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`extra-openai-models.yaml`, as llm's documentation has it."""
    folder = tmp_path_factory.mktemp("llm")
    os.environ["LLM_USER_PATH"] = str(folder)
    entry = [
        "- model_id: here",
        f"  model_name: {MODEL}",
        f"  api_base: {URL}/v1",
        "  supports_schema: true",
        "  supports_tools: true",
    ]
    (folder / "extra-openai-models.yaml").write_text("\n".join(entry) + "\n", encoding="utf-8")


def llm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    return run


def test_prompt() -> None:
    assert llm("-m", "here", "Say hello.", "-o", "max_tokens", "8", "--key", "none").stdout.strip()


def test_without_stream_and_with_usage() -> None:
    run = llm("-m", "here", "Say hello.", "-o", "max_tokens", "8", "--no-stream", "-u", "--key", "none")
    assert "output" in run.stderr
    if IS_EMBEDDED:
        assert "kvshare" in run.stderr


def test_schema() -> None:
    """With room for nothing endless: a small model writes free text until its tokens run out."""
    limits = {"city": {"enum": ["Bern", "Rome"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 40}}
    schema = {"type": "object", "properties": limits, "required": [*limits], "additionalProperties": False}
    run = llm(
        "-m", "here", "Bern, 12", "--schema", json.dumps(schema), "-o", "max_tokens", "96", "--key", "none"
    )
    assert set(json.loads(run.stdout)) == {"city", "degrees"}


def test_tools() -> None:
    """The model decides whether to call: both ways must end well."""
    code = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return 'rain'\n"
    arguments = ("-m", "here", "Weather in Bern?", "--functions", code, "-o", "max_tokens", "32")
    llm(*arguments, "--key", "none", "--chain-limit", "3")


def test_conversation() -> None:
    llm("-m", "here", "My name is Ann.", "-o", "max_tokens", "8", "--key", "none")
    assert llm("-c", "What is my name?", "-o", "max_tokens", "8", "--key", "none").stdout.strip()
