"""swap-setup.sh on real file systems: loop devices that are formatted, mounted and filled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.support import ROOT, Finished, run
from tests.stack.test_swap_setup import (
    NO_ROOM,
    REFUSED,
    SCRIPT,
    active,
    own_swap_is_off,
    swap_setup,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts disks, which takes root")
DISK_BYTES = 1400 << 20  # sparse; the script leaves 1 GiB of a disk free
FORMAT = {"ext4": "mkfs.ext4 -q", "xfs": "mkfs.xfs -q", "btrfs": "mkfs.btrfs -q"}
NAME = "swapfile-specops"  # where no --path is given


def mounted(folder: Path, kind: str) -> Path:
    """A small disk with a file system of this kind; skips where there is none to be had."""
    mkfs = FORMAT[kind].split()
    if shutil.which(mkfs[0]) is None:
        pytest.skip(f"{mkfs[0]} is not installed")
    image, disk = folder / f"{kind}.img", folder / kind
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    for command in ([*mkfs, image], ["mount", "-o", "loop", image, disk]):
        done = run(*command)
        if done.returncode:
            pytest.skip(f"{kind} cannot be tried here: {done.stderr.strip()}")
    return disk


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted disk; whatever swap is on it is off again at the end."""
    folder = mounted(tmp_path, request.param)
    try:
        yield folder
    finally:
        for line in Path("/proc/swaps").read_text().splitlines():
            if line.startswith(f"{folder}/"):
                run("swapoff", line.split()[0])
        done = run("umount", folder)
        assert done.returncode == 0, done.stderr


def skip_where_swap_is_refused(result: Finished) -> None:
    if result.returncode == REFUSED:
        pytest.skip(f"no swap here: {result.stderr}")


@pytest.mark.parametrize("disk", FORMAT, indirect=True)
def test_a_file_on_this_file_system_becomes_swap_and_goes_again(disk: Path) -> None:
    path = disk / "swap"
    first = swap_setup("--size", "8M", path=path)
    skip_where_swap_is_refused(first)
    assert first.returncode == 0, first.stderr
    assert active(path)
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # no holes
    assert f"{path}: active, 8.0M" in swap_setup("--status", path=path).stdout
    inode = path.stat().st_ino
    assert "active already" in swap_setup("--size", "8M", path=path).stdout
    assert path.stat().st_ino == inode
    removed = swap_setup("--remove", path=path)
    assert removed.returncode == 0, removed.stderr
    assert not active(path)
    assert not path.exists()
    assert swap_setup("--remove", path=path).returncode == 0  # nothing there is nothing wrong


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_a_disk_without_room_is_left_as_it_was(disk: Path) -> None:
    before = sorted(disk.iterdir())
    result = swap_setup("--size", "700M", path=disk / "swap")
    assert result.returncode == NO_ROOM
    assert "700.0M of swap" in result.stderr
    assert sorted(disk.iterdir()) == before


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_another_size_has_the_room_of_the_old_file(disk: Path) -> None:
    path = disk / "swap"
    first = swap_setup("--size", "150M", path=path)
    skip_where_swap_is_refused(first)
    assert first.returncode == 0, first.stderr
    # 200 MB would not fit beside the old file, and need not.
    assert swap_setup("--size", "200M", path=path).returncode == 0
    assert path.stat().st_size == 200 << 20
    assert swap_setup("--remove", path=path).returncode == 0


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_size_and_path_come_from_the_environment(disk: Path) -> None:
    env = {
        "SWAP_SIZE": "8M",
        "SWAP_PATH": str(disk / "swap"),
        "SWAP_SWAPPINESS": "1",
        "SWAP_FSTAB": str(disk / "fstab"),
    }
    result = run(SCRIPT, "--dry-run", env=env)
    assert f"would make: {disk}/swap, 8.0M" in result.stdout
    assert "vm.swappiness=1" in result.stdout


def test_an_overlay_is_refused(tmp_path: Path) -> None:
    lower, upper, work, place = (tmp_path / name for name in ("lower", "upper", "work", "place"))
    for folder in (lower, upper, work, place):
        folder.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if (done := run("mount", "-t", "overlay", "-o", layers, "overlay", place)).returncode:
        pytest.skip(f"no overlay here: {done.stderr}")
    try:
        result = swap_setup("--size", "4M", path=place / "swap")
        assert result.returncode == REFUSED
        assert "4 GB without it" in result.stderr
        assert list(place.iterdir()) == []
    finally:
        run("umount", place)


@own_swap_is_off
@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_where_the_root_is_a_container_s_the_disk_with_the_most_room_is_taken(
    disk: Path, tmp_path: Path
) -> None:
    """Root on an overlay, as in a container, and one real disk mounted into it."""
    layers = tmp_path / "layers"
    layers.mkdir()
    program = f"""
        mount -t tmpfs tmpfs {layers} && mkdir {layers}/upper {layers}/work {layers}/root &&
        mount -t overlay overlay {layers}/root \\
            -o lowerdir=/,upperdir={layers}/upper,workdir={layers}/work &&
        mount --bind /proc {layers}/root/proc && mount --bind /dev {layers}/root/dev &&
        mkdir {layers}/root/workspaces && mount --bind {disk} {layers}/root/workspaces ||
        exit 125
        chroot {layers}/root {SCRIPT} --size 8M --dry-run
    """
    result = run("unshare", "--mount", "sh", "-c", program, env={"SWAP_FSTAB": "/nowhere"})
    if result.returncode == 125:
        pytest.skip(f"no overlay over the root here: {result.stderr}")
    if "nothing to add" in result.stdout:
        pytest.skip("this machine has other swap")
    assert f"would make: /workspaces/{NAME}, 8.0M" in result.stdout, result.stderr


@own_swap_is_off
def test_the_file_that_fstab_names_is_the_one_that_is_meant(tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text(f"/dev/vda / ext4 defaults 0 1\n{tmp_path}/{NAME} none swap sw 0 0\n")
    shown = run(SCRIPT, "--status", env={"SWAP_FSTAB": str(fstab)}).stdout
    assert f"{tmp_path}/{NAME}: not there" in shown


def test_the_script_is_the_documented_one() -> None:
    options = run(SCRIPT, "--help").stdout
    page = (ROOT / "docs" / "stack.md").read_text()
    for option in ("--status", "--remove", "--persist", "--dry-run"):
        assert option in options
        assert option in page
