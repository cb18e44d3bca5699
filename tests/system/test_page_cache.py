"""`read_ahead` brings a file into the page cache, `forget` drops it."""

import mmap
import os
from pathlib import Path

import pytest

from specops.system.page_cache import forget, read_ahead
from tests.system.page_cache import cached

SIZE = 3 * mmap.PAGESIZE + 100


@pytest.fixture
def forgotten(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    assert cached(path, 0)
    forget(path)
    if cached(path, 0):
        pytest.skip("files of this file system live in memory")
    return path


def test_a_part_that_is_read_ahead_is_cached(forgotten: Path) -> None:
    with forgotten.open("rb") as file:
        read_ahead(file.fileno(), mmap.PAGESIZE, SIZE)
    assert all(cached(forgotten, page) for page in (1, 2, 3))


@pytest.mark.parametrize(("start", "size"), [(0, -5), (1 << 20, 4096)])
def test_nothing_is_read_where_nothing_is(forgotten: Path, start: int, size: int) -> None:
    with forgotten.open("rb") as file:
        read_ahead(file.fileno(), start, size)
    assert not cached(forgotten, 0)


def test_a_file_that_cannot_be_mapped_is_left_alone(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="No such device"):
            mmap.mmap(folder, 1, prot=mmap.PROT_READ)
        read_ahead(folder, 0, 4096)
    finally:
        os.close(folder)


def test_a_file_that_is_gone_cannot_be_forgotten(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        forget(tmp_path / "weights")
