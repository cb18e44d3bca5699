"""swap-setup.sh: refusals, and swap on loop devices that are formatted, mounted and filled."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stack.support import ROOT, Finished, run, write_programs

SCRIPT = ROOT / "swap-setup.sh"
WRONG_USE, REFUSED, NO_ROOM = 2, 3, 4
DISK_BYTES = 1500 << 20  # sparse; the script leaves 1 GiB of a disk free
FORMAT = {"ext4": "mkfs.ext4 -q", "xfs": "mkfs.xfs -q", "btrfs": "mkfs.btrfs -q"}
NAME = "swapfile-specops"  # the default name
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script is for Linux")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="swap and mounts take root")
OTHER_LINE = "/dev/vda / ext4 defaults 0 1\n"  # of an fstab


def swap_setup(*options: object, path: Path, through: tuple[str, ...] = ()) -> Finished:
    """Run the script with a swap file and an fstab of the test's own; skips if swap is refused."""
    env = {"SWAP_FSTAB": str(path.parent / "fstab")}
    result = run(*through, SCRIPT, "--path", path, *options, env=env)
    if result.returncode == REFUSED and "swapon was refused" in result.stderr and not through:
        pytest.skip(f"no swap here: {result.stderr}")
    return result


@pytest.fixture(scope="module")
def own_swap_is_off() -> None:
    """Without --path the script finds the files that it has made on this machine."""
    if "does not exist" not in (
        shown := run(SCRIPT, "--status", env={"SWAP_FSTAB": "/nowhere"}).stdout
    ):
        pytest.skip(f"this machine has a swap file of the script: {shown}")


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


@dataclass(frozen=True)
class Call:
    """A call of the script in a folder, and what follows from it.

    Attributes:
        options: the command line, or a line of a shell with `setup`; `DISK` stands for the folder.
        status: the exit status.
        says: a part of the output.
        left: the names of the active swap files after it.
        before: earlier calls, or commands of a shell.
    """

    options: str
    status: int
    says: str
    left: str = ""
    before: tuple[str, ...] = ()


MAKE_A = "setup --path DISK/a --size 4M"
KEEP_A = f"{MAKE_A} --persist"
OTHER_SWAP = "dd if=/dev/zero of=DISK/o bs=1K count=4100 && mkswap DISK/o && swapon DISK/o"
BY_VARIABLES = "SWAP_SIZE=8M SWAP_PATH=DISK/e SWAP_SWAPPINESS=1"
DRY = """would make: DISK/e, 8.0M, readable by root only
would run: swapon -- DISK/e
would set vm.swappiness=1
"""
CALLS = [
    Call("--size much", WRONG_USE, "--size must be like 12G or 512M, at least 1M, not 'much'"),
    Call("--size '1 G'", WRONG_USE, "--size must be like 12G or 512M, at least 1M, not '1 G'"),
    Call("--size 10", WRONG_USE, "--size must be like 12G or 512M, at least 1M, not '10'"),
    Call("--size 9999999999999G", WRONG_USE, "--size must be like 12G or 512M"),
    Call("--size", WRONG_USE, "--size needs a value"),
    Call("--swappiness 201", WRONG_USE, "--swappiness must be 0 to 200, not '201'"),
    Call("--swappiness 008", WRONG_USE, "--swappiness must be 0 to 200, not '008'"),
    Call("--path ''", WRONG_USE, "--path needs a value"),
    Call("--path swap", WRONG_USE, "--path must be the full path of a file"),
    Call("--status --remove", WRONG_USE, "--status and --remove exclude each other"),
    Call("--remove --persist", WRONG_USE, "--remove and --persist exclude each other"),
    Call("--fast", WRONG_USE, "unknown option --fast; --help lists them"),
    Call("--path DISK/a --size 900T", NO_ROOM, "900.0T of swap"),
    Call("--path DISK/no/a --size 4M", 1, "there is no folder DISK/no"),
    Call("--path DISK", 1, "DISK exists and is not a swap file: not touched"),
    Call("--remove --path /dev/null", 1, "/dev/null exists and is not a swap file"),
    Call("--remove", 0, "This script has made no swap file: nothing to remove."),
    Call("--remove --dry-run", 0, "nothing to remove"),
    Call("--status", 0, f"{NAME}: does not exist"),
    Call("--path DISK/a --size 4M", 0, "DISK/a is active, 4.0M.", "a"),
    Call("--path DISK/a --size 4M", 0, "DISK/a is active already", "a", (MAKE_A,)),
    # Without a path each means the files that were made, wherever they lie.
    Call("--status", 0, "DISK/a: active, 4.0M", "a", (MAKE_A,)),
    Call("--status", 0, "After a reboot: yes", "a", (KEEP_A,)),
    Call("--status", 0, "DISK/a: exists, not active", "", (KEEP_A, "swapoff DISK/a")),
    Call("--size 8M", 0, "DISK/a is active, 8.0M.", "a", (KEEP_A,)),
    Call("--remove", 0, "DISK/a is removed.", "", (MAKE_A,)),
    Call("--remove", 0, "DISK/a is removed.", "", (KEEP_A, "swapoff DISK/a")),
    Call("--remove", 0, "DISK/b is removed.", "", (KEEP_A, KEEP_A.replace("/a", "/b"))),
    Call("--remove --dry-run", 0, "would run: swapoff -- DISK/a", "a", (KEEP_A,)),
    Call("--remove --path DISK/b", 0, "DISK/b does not exist", "a", (KEEP_A,)),
    Call(
        "--status",
        0,
        f"DISK/{NAME}: does not exist",
        "",
        (f"printf '\n%s none\n' DISK/{NAME} >>DISK/fstab",),
    ),
    # Swap that others made.
    Call("--size 4M --dry-run", 0, "already has 4.0M of swap: nothing to add", "o", (OTHER_SWAP,)),
    Call("--size 4M --path DISK/a", 0, "DISK/a is active, 4.0M", "a o", (OTHER_SWAP,)),
    Call("--remove", 0, "This script has made no swap file", "o", (OTHER_SWAP,)),
    Call(f"{BY_VARIABLES} setup --dry-run", 0, DRY),
    # A name is not the file.
    Call("--remove --path DISK/./x/../a", 0, "DISK/a is removed.", "", (KEEP_A,)),
    Call("--remove --path DISK/l/a", 0, "DISK/a is removed.", "", (KEEP_A, "ln -s DISK DISK/l")),
    Call("--remove --path DISK/t", 1, "DISK/t exists and", "", ("echo not swap >DISK/t",)),
    Call("--size 4M --path DISK/t", 1, "DISK/t exists and", "", ("echo not swap >DISK/t",)),
]


@pytest.mark.usefixtures("own_swap_is_off")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ; ".join((*call.before, call.options)))
def test_a_call_answers_in_words_that_are_true(
    call: Call, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    disk = tmp_path
    if call.status != WRONG_USE:
        if os.geteuid():
            pytest.skip("swap and mounts take root")
        disk = request.getfixturevalue("disk")
    fstab = disk / "fstab"
    fstab.write_text(OTHER_LINE.rstrip("\n"))  # some files lack the end of their last line
    env = {"SWAP_FSTAB": str(fstab)}

    def shell(line: str) -> Finished:
        line = line.replace("DISK", str(disk)).replace("setup ", f"{SCRIPT} ")
        return run("bash", "-c", line, env=env)

    for earlier in call.before:
        if "swapon was refused" in (done := shell(earlier)).stderr:
            pytest.skip(f"no swap here: {done.stderr}")
        assert done.returncode == 0, done.stderr
    files, kept = sorted(disk.iterdir()), fstab.read_text()
    done = shell(call.options if "setup" in call.options else f"setup {call.options}")
    if "swapon was refused" in done.stderr:
        pytest.skip(f"no swap here: {done.stderr}")
    assert done.returncode == call.status, done.stderr
    assert call.says.replace("DISK", str(disk)) in done.stdout + done.stderr
    for line in done.stderr.splitlines():  # and not those of a tool
        assert line.startswith("swap-setup: ")
    left = {path.name for path in disk.iterdir() if active(path)}
    assert left == set(call.left.split())
    for name in re.findall(rf"{disk}/(\w+) is removed", done.stdout):
        assert not (disk / name).exists()
        assert f"{disk}/{name}" not in fstab.read_text()
    assert fstab.read_text().startswith(OTHER_LINE.rstrip("\n"))
    if done.returncode or "--status" in call.options or "--dry-run" in call.options:
        assert (sorted(disk.iterdir()), fstab.read_text()) == (files, kept)


def test_the_options_are_documented() -> None:
    documented = (ROOT / "docs" / "stack.md").read_text()
    shown = run(SCRIPT, "--help").stdout
    for option in ("--status", "--remove", "--persist", "--dry-run"):
        assert option in shown
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
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="takes setpriv")
def test_if_swapon_is_refused_nothing_was_laid_and_nothing_is_lost(disk: Path) -> None:
    path, sizes = disk / "swap", disk / "sizes"
    without_rights = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    recorded = f'#!/bin/sh\nstat -c %s -- "$2" >>{sizes}\nexec {shutil.which("swapon")} "$@"\n'
    write_programs(disk, **{"bin/swapon": recorded})
    through = ("env", f"PATH={disk}/bin:{os.environ['PATH']}", *without_rights)
    result = swap_setup("--size", "200M", path=path, through=through)
    assert result.returncode == REFUSED, result.stderr
    assert "4 GB without it" in result.stderr
    assert list(disk.glob("swap*")) == []
    assert sizes.read_text() == f"{1 << 20}\n"  # it asked with a small file first
    assert swap_setup("--size", "2M", path=path).returncode == 0
    assert swap_setup("--size", "4M", path=path, through=through).returncode == REFUSED
    assert active(path)


@as_root
@pytest.mark.parametrize("disk", FORMAT, indirect=True)
def test_swap_is_made_kept_resized_and_removed(disk: Path) -> None:
    path, fstab = disk / "swap", disk / "fstab"
    fstab.write_text(OTHER_LINE)
    now = Path("/proc/sys/vm/swappiness").read_text().strip()
    first = swap_setup("--size", "150M", "--persist", "--swappiness", now, path=path)
    assert first.returncode == 0, first.stderr
    assert active(path)
    assert path.stat().st_mode & 0o077 == 0
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # no holes
    assert f"{path}: active, 150.0M" in swap_setup("--status", path=path).stdout
    inode = path.stat().st_ino
    assert "active already" in swap_setup("--size", "150M", "--persist", path=path).stdout
    assert path.stat().st_ino == inode
    assert fstab.read_text().count(str(path)) == 1
    (setting,) = (disk / "sysctl.d").iterdir()
    assert setting.read_text() == f"vm.swappiness = {now}\n"
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
    assert fstab.read_text() == OTHER_LINE
    assert not setting.exists()


@as_root
@pytest.mark.usefixtures("own_swap_is_off")
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
