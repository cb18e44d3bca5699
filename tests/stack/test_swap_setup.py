"""swap-setup.sh refuses what it must, touches nothing else, and makes swap where it may."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.stack.support import ROOT, Finished, run

TMPFS = Path("/dev/shm")  # noqa: S108
SCRIPT = ROOT / "swap-setup.sh"
WRONG_USE, REFUSED, NO_ROOM = 2, 3, 4
own_swap_is_off = pytest.mark.skipif(
    "/swapfile-specops" in Path("/proc/swaps").read_text(),
    reason="this machine's swap is the script's, which is what it finds without --path",
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes swap, which takes root")


def swap_setup(*options: object, path: Path, through: tuple[str, ...] = ()) -> Finished:
    """Run the script with a file and an fstab of the test's own."""
    env = {"SWAP_FSTAB": str(path.parent / "fstab")}
    return run(*through, SCRIPT, "--path", path, *options, env=env)


def active(path: Path) -> bool:
    lines = Path("/proc/swaps").read_text().splitlines()
    return any(line.split()[0] == str(path) for line in lines)


@pytest.fixture
def swap_file(tmp_path: Path) -> Path:
    return tmp_path / "swapfile"


@pytest.mark.parametrize(
    "options",
    [["--size", "much"], ["--size", "10"], ["--size"], ["--swappiness", "201"], ["--fast"]],
)
def test_wrong_use_is_named(options: list[str], swap_file: Path) -> None:
    result = swap_setup(*options, path=swap_file)
    assert result.returncode == WRONG_USE
    assert options[0] in result.stderr


def test_status_and_dry_run_change_nothing(swap_file: Path) -> None:
    assert "Swappiness" in swap_setup("--status", path=swap_file).stdout
    dry = swap_setup("--size", "4M", "--persist", "--dry-run", path=swap_file)
    assert dry.returncode in {0, REFUSED}, dry.stderr
    assert not active(swap_file)  # other swap may come and go meanwhile: that of other tests
    assert list(swap_file.parent.iterdir()) == []


def test_a_disk_that_is_too_small_has_a_status_of_its_own(swap_file: Path) -> None:
    result = swap_setup("--size", "900T", "--dry-run", path=swap_file)
    assert result.returncode in {NO_ROOM, REFUSED}  # refused: not even a small one could be here
    assert not swap_file.exists()


@pytest.mark.skipif(not TMPFS.is_dir(), reason="no tmpfs to try")
def test_a_file_system_without_swap_files_is_refused_with_the_good_news() -> None:
    result = swap_setup("--size", "4M", "--dry-run", path=TMPFS / "specops-swap-test")
    assert result.returncode == REFUSED
    assert "4 GB without it" in result.stderr


@as_root
def test_another_file_is_never_overwritten(swap_file: Path) -> None:
    swap_file.write_text("not swap")
    for option in ("--size=1M", "--remove"):
        assert swap_setup(*option.split("="), path=swap_file).returncode == 1
        assert swap_file.read_text() == "not swap"


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="takes setpriv")
def test_where_swapon_is_refused_nothing_is_left_behind(swap_file: Path) -> None:
    without_rights = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    result = swap_setup("--size", "2M", path=swap_file, through=without_rights)
    assert result.returncode == REFUSED, result.stderr
    assert "4 GB without it" in result.stderr
    assert not swap_file.exists()


@as_root
def test_swap_is_made_kept_resized_and_removed(swap_file: Path) -> None:
    fstab = swap_file.parent / "fstab"
    fstab.write_text("/dev/vda / ext4 defaults 0 1\n")
    try:
        first = swap_setup("--size", "2M", "--persist", path=swap_file)
        if first.returncode == REFUSED:
            pytest.skip(f"no swap here: {first.stderr}")
        assert first.returncode == 0, first.stderr
        assert active(swap_file)
        assert swap_file.stat().st_mode & 0o077 == 0
        again = swap_setup("--size", "2M", "--persist", path=swap_file)
        assert "active already" in again.stdout
        assert fstab.read_text().count("swapfile") == 1
        assert swap_setup("--size", "3M", path=swap_file).returncode == 0
        assert swap_file.stat().st_size == 3 << 20
        assert active(swap_file)
    finally:
        removed = swap_setup("--remove", path=swap_file)
    assert removed.returncode == 0, removed.stderr
    assert not active(swap_file)
    assert not swap_file.exists()
    assert fstab.read_text() == "/dev/vda / ext4 defaults 0 1\n"


@as_root
@own_swap_is_off
def test_a_machine_with_enough_swap_gets_no_more_unless_a_file_is_named(swap_file: Path) -> None:
    env = {"SWAP_FSTAB": "/nowhere"}
    made = swap_setup("--size", "4M", path=swap_file)
    if made.returncode == REFUSED:
        pytest.skip(f"no swap here: {made.stderr}")
    try:
        assert "nothing to add" in run(SCRIPT, "--size", "1M", "--dry-run", env=env).stdout
        named = run(SCRIPT, "--size", "1M", "--dry-run", "--path", f"{swap_file}2", env=env)
        assert f"would make: {swap_file}2" in named.stdout
    finally:
        assert swap_setup("--remove", path=swap_file).returncode == 0
