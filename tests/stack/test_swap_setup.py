"""swap-setup.sh: refusals, and swap on loop devices that are formatted, mounted and filled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.support import ROOT, Finished, run

SCRIPT = ROOT / "swap-setup.sh"
WRONG_USE, REFUSED, NO_ROOM = 2, 3, 4
DISK_BYTES = 1500 << 20  # sparse; the script leaves 1 GiB of a disk free
FORMAT = {"ext4": "mkfs.ext4 -q", "xfs": "mkfs.xfs -q", "btrfs": "mkfs.btrfs -q"}
NAME = "swapfile-specops"  # the default name
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="swap and mounts take root")
own_swap_is_off = pytest.mark.skipif(
    f"/{NAME}" in Path("/proc/swaps").read_text(),
    reason="the script finds this machine's own swap file if it gets no --path",
)


def swap_setup(*options: object, path: Path, through: tuple[str, ...] = ()) -> Finished:
    """Run the script with a swap file and an fstab of the test's own; skips if swap is refused."""
    env = {"SWAP_FSTAB": str(path.parent / "fstab")}
    result = run(*through, SCRIPT, "--path", path, *options, env=env)
    if result.returncode == REFUSED and "swapon was refused" in result.stderr and not through:
        pytest.skip(f"no swap here: {result.stderr}")
    return result


def active(path: Path) -> bool:
    lines = Path("/proc/swaps").read_text().splitlines()
    return any(line.split()[0] == str(path) for line in lines)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small mounted disk, of ext4 without a parameter; swap on it is off at the end."""
    kind = getattr(request, "param", "ext4")
    mkfs = FORMAT[kind].split()
    if shutil.which(mkfs[0]) is None:
        pytest.skip(f"{mkfs[0]} is not installed")
    image, folder = tmp_path / f"{kind}.img", tmp_path / kind
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    for command in ([*mkfs, image], ["mount", "-o", "loop", image, folder]):
        if (done := run(*command)).returncode:
            pytest.skip(f"{kind} cannot be tried here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        for line in Path("/proc/swaps").read_text().splitlines():
            if line.startswith(f"{folder}/"):
                run("swapoff", line.split()[0])
        done = run("umount", folder)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options",
    [["--size", "much"], ["--size", "10"], ["--size"], ["--swappiness", "201"], ["--fast"]],
)
def test_wrong_use_is_named(options: list[str], tmp_path: Path) -> None:
    result = swap_setup(*options, path=tmp_path / "swap")
    assert result.returncode == WRONG_USE
    assert options[0] in result.stderr


def test_help_status_and_dry_run_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "swap"
    assert "Swappiness" in swap_setup("--status", path=path).stdout
    dry = swap_setup("--size", "4M", "--persist", "--dry-run", path=path)
    assert dry.returncode in {0, REFUSED}, dry.stderr
    too_large = swap_setup("--size", "900T", "--dry-run", path=path)
    assert too_large.returncode in {NO_ROOM, REFUSED}  # refused: a small one could not be here
    assert not active(path)
    assert list(tmp_path.iterdir()) == []
    documented = (ROOT / "docs" / "stack.md").read_text()
    for option in ("--status", "--remove", "--persist", "--dry-run"):
        assert option in swap_setup("--help", path=path).stdout
        assert option in documented


@as_root
@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_file_system_that_cannot_hold_swap_is_refused(kind: str, tmp_path: Path) -> None:
    mount = tmp_path / "place"
    for folder in (mount, tmp_path / "upper", tmp_path / "work"):
        folder.mkdir()
    layers = f"lowerdir=/etc,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    options = ("-o", layers) if kind == "overlay" else ()
    if (done := run("mount", "-t", kind, *options, kind, mount)).returncode:
        pytest.skip(f"no {kind} here: {done.stderr}")
    try:
        before = sorted(mount.iterdir())
        result = swap_setup("--size", "4M", path=mount / "swap")
        assert result.returncode == REFUSED
        assert "4 GB without it" in result.stderr
        assert sorted(mount.iterdir()) == before
    finally:
        run("umount", mount)


@as_root
def test_another_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "swap"
    path.write_text("not swap")
    for option in ("--size=1M", "--remove"):
        assert swap_setup(*option.split("="), path=path).returncode == 1
        assert path.read_text() == "not swap"


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="takes setpriv")
def test_if_swapon_is_refused_nothing_is_left(disk: Path) -> None:
    path = disk / "swap"
    without_rights = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    result = swap_setup("--size", "2M", path=path, through=without_rights)
    assert result.returncode == REFUSED, result.stderr
    assert "4 GB without it" in result.stderr
    assert not path.exists()


@as_root
@pytest.mark.parametrize("disk", FORMAT, indirect=True)
def test_swap_is_made_kept_resized_and_removed(disk: Path) -> None:
    path, fstab = disk / "swap", disk / "fstab"
    fstab.write_text("/dev/vda / ext4 defaults 0 1\n")
    first = swap_setup("--size", "150M", "--persist", path=path)
    assert first.returncode == 0, first.stderr
    assert active(path)
    assert path.stat().st_mode & 0o077 == 0
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # no holes
    assert f"{path}: active, 150.0M" in swap_setup("--status", path=path).stdout
    inode = path.stat().st_ino
    assert "active already" in swap_setup("--size", "150M", "--persist", path=path).stdout
    assert path.stat().st_ino == inode
    assert fstab.read_text().count(str(path)) == 1
    # 250 MB do not fit beside the old file, and 700 MB do not fit at all.
    assert swap_setup("--size", "250M", path=path).returncode == 0
    assert path.stat().st_size == 250 << 20
    result = swap_setup("--size", "700M", path=path)
    assert result.returncode == NO_ROOM
    assert "700.0M of swap" in result.stderr
    assert active(path)
    for _ in range(2):  # to remove nothing is no error
        removed = swap_setup("--remove", path=path)
        assert removed.returncode == 0, removed.stderr
        assert not active(path)
        assert not path.exists()
    assert fstab.read_text() == "/dev/vda / ext4 defaults 0 1\n"


@as_root
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


@as_root
@own_swap_is_off
def test_a_machine_with_enough_swap_gets_no_more_unless_a_file_is_named(disk: Path) -> None:
    env = {"SWAP_FSTAB": "/nowhere"}
    made = swap_setup("--size", "4M", path=disk / "swap")
    assert made.returncode == 0, made.stderr
    assert "nothing to add" in run(SCRIPT, "--size", "1M", "--dry-run", env=env).stdout
    named = run(SCRIPT, "--size", "1M", "--dry-run", "--path", f"{disk}/other", env=env)
    assert f"would make: {disk}/other" in named.stdout


@own_swap_is_off
def test_the_file_in_fstab_is_found_without_a_path(tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text(f"/dev/vda / ext4 defaults 0 1\n{tmp_path}/{NAME} none swap sw 0 0\n")
    shown = run(SCRIPT, "--status", env={"SWAP_FSTAB": str(fstab)}).stdout
    assert f"{tmp_path}/{NAME}: not there" in shown


@as_root
@own_swap_is_off
def test_if_the_root_is_an_overlay_the_disk_with_the_most_room_is_taken(
    disk: Path, tmp_path: Path
) -> None:
    """As in a container: the root on an overlay, and one real disk mounted into it."""
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
