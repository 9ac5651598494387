"""What the machine is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshare import machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nmodel name\t: AMD  EPYC 9B14\nflags : fpu\n", "AMD EPYC 9B14"),
        ("processor : 0\nBogoMIPS : 50\n\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
    ],
)
def test_the_processor_is_named_as_the_system_names_it(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first name that there is, in one line."""
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
    assert machine.processor() == expected


def test_a_system_that_names_no_processor_has_an_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, which has no such file."""
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "none")
    assert machine.processor()
    assert machine.num_cores() >= 1
