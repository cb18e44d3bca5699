"""What is evicted has to be read from the disk again."""

import os
from pathlib import Path

import pytest

from bench.memory.page_cache import evict
from tests.system.page_cache import cached


def test_all_files_below_a_folder_leave_the_page_cache_whole(tmp_path: Path) -> None:
    files = [tmp_path / "graph", tmp_path / "weights" / "data"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(os.urandom(1 << 20))
    assert all(cached(file, 0) for file in files)
    evict(tmp_path)
    if cached(files[0], 0):
        pytest.skip("files of this file system live in memory")
    assert not any(cached(file, 0) for file in files)
    assert all(file.stat().st_size == 1 << 20 for file in files)
