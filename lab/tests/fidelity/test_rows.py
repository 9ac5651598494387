"""What is measured is kept, what is left is found again, by one process or several."""

import json
from pathlib import Path

import pytest

from kvshare.errors import ConfigError
from kvshare_lab.fidelity.rows import Shards, Stage, Task, read_stages, rows_of

ONE = Stage(name="one", half=0, plans={"rag": 4, "window": 2}, rules=("full",))
TWO = Stage(name="two", half=1, plans={"rag": 2}, rules=("full",))


def measure(shards: Shards, task: Task) -> None:
    shards.add(task, {"suite": task.suite, "number": task.number, "model": "small", "arms": []})


def keys(tasks: list[Task]) -> list[tuple[str, str, int]]:
    return [(task.stage.name, task.suite, task.number) for task in tasks]


def test_suites_take_turns_and_stages_follow(tmp_path: Path) -> None:
    """Number by number, so that a run that ends early has some of every suite."""
    assert keys(list(Shards(tmp_path).left([ONE, TWO]))) == [
        ("one", "rag", 0),
        ("one", "window", 0),
        ("one", "rag", 1),
        ("one", "window", 1),
        ("one", "rag", 2),
        ("one", "rag", 3),
        ("two", "rag", 0),
        ("two", "rag", 1),
    ]


def test_a_later_run_has_only_what_is_left(tmp_path: Path) -> None:
    """The same suite and number of another stage is another task."""
    shards = Shards(tmp_path)
    tasks = list(shards.left([ONE, TWO]))
    for task in tasks[:3]:
        measure(shards, task)
    assert keys(list(shards.left([ONE, TWO]))) == keys(tasks[3:])
    assert keys(list(Shards(tmp_path).left([ONE, TWO]))) == keys(tasks[3:])
    assert ("two", "rag", 0) in keys(tasks[3:])
    lines = (tmp_path / "one" / "rag-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1]


@pytest.mark.parametrize("change", [{"rules": ("prefix",)}, {"budgets": (0.3,)}, {"rank": True}, {"half": 1}])
def test_rows_of_another_measurement_do_not_count(tmp_path: Path, change: dict[str, object]) -> None:
    """More plans are more work; other rules, budgets or measures are another stage."""
    shards = Shards(tmp_path)
    for task in list(shards.left([ONE])):
        measure(shards, task)
    more = ONE.model_copy(update={"plans": {"rag": 5, "window": 2}})
    assert keys(list(Shards(tmp_path).left([more]))) == [("one", "rag", 4)]
    with pytest.raises(ConfigError, match="stage one"):
        list(Shards(tmp_path).left([ONE.model_copy(update=change)]))
    assert Shards(tmp_path).models == {"small"}


def test_parts_share_all_tasks(tmp_path: Path) -> None:
    """Each task belongs to one of them; both have work; one sees what the other has done."""
    many = Stage(name="many", half=0, plans={"rag": 40, "window": 30}, rules=("full",))
    parts = [list(Shards(tmp_path, part, 3).left([many])) for part in range(3)]
    found = [key for part in parts for key in keys(part)]
    assert len(found) == len(set(found)) == 70
    assert set(found) == set(keys(list(Shards(tmp_path).left([many]))))
    assert min(len(part) for part in parts) >= 10
    first = Shards(tmp_path, 0, 3)
    for task in parts[0]:
        measure(first, task)
    assert {path.name for path in (tmp_path / "many").iterdir()} == {"rag-0.jsonl", "window-0.jsonl"}
    assert not list(Shards(tmp_path, 0, 3).left([many]))
    assert keys(list(Shards(tmp_path).left([many]))) == sorted(
        set(found) - set(keys(parts[0])), key=lambda key: (key[2], key[1])
    )


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    """A killed run loses the plan it was at, and the next run none: it begins a line of its own."""
    shards = Shards(tmp_path)
    tasks = list(shards.left([ONE]))
    measure(shards, tasks[0])
    measure(shards, tasks[2])
    path = tmp_path / "one" / "rag-0.jsonl"
    path.write_text(path.read_text()[:-9])
    assert [row["number"] for row in rows_of(path)] == [0]
    again = Shards(tmp_path)
    assert keys(list(again.left([ONE]))) == keys(tasks[1:])
    for task in list(again.left([ONE])):
        measure(again, task)
    assert not list(Shards(tmp_path).left([ONE]))
    assert sorted(row["number"] for row in rows_of(path)) == [0, 1, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def written(folder: Path, text: str) -> Path:
    path = folder / "stages.yaml"
    path.write_text(text)
    return path


def test_stages_are_read_in_their_order(tmp_path: Path) -> None:
    """With the defaults of what is not said."""
    text = """
stages:
  - {name: first, half: 0, plans: {rag: 3}, rules: [epic, full], budgets: [0.1, 0.2]}
  - {name: last, half: 1, plans: {rag: 1}, rules: [full], rank: true}
"""
    first, last = read_stages(written(tmp_path, text))
    assert (first.name, first.rules, first.budgets, first.rank) == (
        "first",
        ("epic", "full"),
        (0.1, 0.2),
        False,
    )
    assert (last.half, last.budgets, last.rank, last.charged) == (1, (0.1,), True, ())


@pytest.mark.parametrize(
    ("stage", "key", "problem"),
    [
        ("{name: a, half: 0, plans: {rag: 1}, rules: [full], size: 3}", "stages.0.size", "got 3"),
        ("{name: a, half: 2, plans: {rag: 1}, rules: [full]}", "stages.0.half", "got 2"),
        ("{name: A b, half: 0, plans: {rag: 1}, rules: [full]}", "stages.0.name", "got 'A b'"),
        ("{name: a, half: 0, plans: {rag: many}, rules: [full]}", "stages.0.plans.rag", "got 'many'"),
        ("{name: a, half: 0, plans: {rag: 1}}", "stages.0.rules", "required"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(tmp_path: Path, stage: str, key: str, problem: str) -> None:
    """File, key path, what is wrong and what was there."""
    with pytest.raises(ConfigError) as caught:
        read_stages(written(tmp_path, f"stages: [{stage}]"))
    assert f"stages.yaml: {key}" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", [": [", "{stages"])
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, text: str) -> None:
    """As is one that is not there."""
    with pytest.raises(ConfigError, match=r"stages\.yaml.*cannot be read as YAML"):
        read_stages(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_stages(tmp_path / "nowhere.yaml")
