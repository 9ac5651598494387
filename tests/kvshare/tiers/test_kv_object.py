"""The format of stored segments: what is written comes back, and what is changed anywhere is refused."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvshare.kv.layout import KVLayout
from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import (
    PAGE_BYTES,
    Header,
    ObjectError,
    StoredObject,
    checks_of,
    verify,
    write_object,
)
from kvshare.tiers.pace import BytesRead
from tests.kvshare.tiers.stored import LAYOUT, form, segment

CPU = torch.device("cpu")
LAYOUTS = {
    "float32": LAYOUT,
    "bfloat16": KVLayout.uniform(2, 3, 4, dtype=torch.bfloat16, device=CPU),
    "two shapes": KVLayout.of_shapes([((2, 5), (2, 5)), ((1, 3), (2, 7))], dtype=torch.float16, device=CPU),
}


def written(path: Path, number: int = 7, layout: KVLayout = LAYOUT, num_tokens: int = 8) -> Header:
    described, kv = segment(number, num_tokens, layout)
    of = form(layout)
    header = Header(described, of.fingerprint, of.planes(num_tokens), checks_of(kv.rows()))
    write_object(Files(), path, header, kv.rows())
    return header


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_comes_back(tmp_path: Path, name: str) -> None:
    """The segment, the fingerprint, the planes and their bytes; of each dtype, and planes of two shapes."""
    layout, path = LAYOUTS[name], tmp_path / "one.kv"
    header = written(path, layout=layout)
    _, kv = segment(7, 8, layout)
    with closing(StoredObject(Files(), path)) as found:
        assert (found.header.segment, found.header.fingerprint) == (header.segment, header.fingerprint)
        assert found.header.planes == header.planes
        for number, rows in enumerate(kv.rows()):
            assert np.array_equal(found.rows(number), rows)


def test_any_safetensors_tool_reads_it(tmp_path: Path) -> None:
    """Each plane is a tensor with its shape, and the bytes begin at a whole page."""
    path = tmp_path / "one.kv"
    header = written(path)
    _, kv = segment(7)
    with safe_open(path, framework="pt") as opened:
        assert {name: tuple(opened.get_tensor(name).shape) for name in opened.keys()} == {  # noqa: SIM118
            plane.name: plane.shape for plane in header.planes
        }
        assert torch.equal(opened.get_tensor("k.0"), kv.planes[0])
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % PAGE_BYTES == 0


def test_a_range_of_layers_is_read_and_checked_without_the_others(tmp_path: Path) -> None:
    """A changed byte of the second layer is noticed where that layer is read, and only there."""
    path = tmp_path / "one.kv"
    header = written(path)
    _, kv = segment(7)
    start = path.stat().st_size - header.segment.num_bytes
    raw = bytearray(path.read_bytes())
    raw[start + header.planes[0].layer_bytes] ^= 1  # the first byte of the second layer
    path.write_bytes(raw)
    with closing(StoredObject(Files(), path)) as found:
        assert np.array_equal(found.rows(0, 0, 1), kv.rows()[0][:1])
        assert np.array_equal(found.rows(1), kv.rows()[1])
        with pytest.raises(ObjectError, match="do not match"):
            found.rows(0, 1, 2)


def test_no_changed_byte_passes(tmp_path: Path) -> None:
    """Every byte, of the header's length, of the header, of its padding and of all rows, one at a time."""
    path = tmp_path / "one.kv"
    written(path)
    whole = path.read_bytes()
    padding = range(whole.index(b"}", whole.rindex(b"data_offsets")) + 4, PAGE_BYTES, 97)
    places = sorted({*range(0, len(whole), 5), *padding})
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 0x15
        path.write_bytes(changed)
        with pytest.raises(ObjectError):
            verify(Files(), path)
    path.write_bytes(whole)
    assert verify(Files(), path).segment == segment(7)[0]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, -1])
def test_a_torn_file_is_refused(tmp_path: Path, length: int) -> None:
    """Wherever it ends."""
    path = tmp_path / "one.kv"
    written(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ObjectError):
        verify(Files(), path)


@pytest.mark.parametrize("counts", [False, True])
def test_of_a_large_object_the_rows_alone_are_progress(tmp_path: Path, counts: bool) -> None:
    """A header is read at once, and says nothing of the time of the rest."""
    path, read = tmp_path / "one.kv", BytesRead()
    written(path)
    with closing(StoredObject(Files(), path, read, counts_header=counts)) as found:
        header = int(read)
        found.rows(0)
    assert (header > 0) is counts
    assert int(read) > header
