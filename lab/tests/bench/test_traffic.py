"""A log served and compared with full prefills: what is exact comes out exact, what is shared is counted."""

import json
from pathlib import Path

import pytest

from kvshare.demo import MODEL_PATH
from kvshare.errors import LogError
from kvshare_lab.bench.traffic import run
from kvshare_lab.demo_model.pairs import near_duplicate_pairs

pytestmark = pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Six forms, each with an edit of it."""
    path = tmp_path / "forms.jsonl"
    with path.open("w") as file:
        for pair in near_duplicate_pairs(seed=77, count=6):
            for messages in (pair.donor_messages, pair.recipient_messages):
                file.write(json.dumps({"messages": list(messages)}) + "\n")
    return path


async def test_forms_are_shared_and_answered_as_a_full_prefill_would(log: Path) -> None:
    """The model computes its own forms to the letter, so answers hardly deviate and greedy ones are equal."""
    found = await run(log=log, model="demo", requests=12, every=1, free_tokens=8)
    assert found["requests"] == sum(found["decisions"].values()) == 12
    assert found["decisions"]["approx"] >= 4
    assert 0.2 < found["used"] < 1
    measured = found["measured"]
    assert measured["plans"] == found["decisions"]["approx"]
    assert 0 <= measured["kl"] < 0.002
    assert measured["top1"] == measured["equal"] == measured["agreement"] == 1
    assert 0 < measured["expected"] <= 0.02
    parts = [found["of originals"]["plans"], found["of approximate prompts"]["plans"]]
    assert sum(parts) == measured["plans"]


async def test_nothing_approximate_is_measured_where_nothing_may_deviate(log: Path) -> None:
    found = await run(log=log, model="demo", requests=6, every=1, max_deviation=0.0)
    assert set(found["decisions"]) <= {"full", "exact"}
    assert found["measured"] == {"plans": 0}
    assert found["reasons"].get("deviates_too_much", 0) >= 1


async def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("no log\n")
    with pytest.raises(LogError):
        await run(log=path, model="demo", requests=2)
