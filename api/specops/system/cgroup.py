"""Finds and reads the cgroup files that limit this process's memory and CPUs, versions 1 and 2."""

import re
from pathlib import Path

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def cgroup_folders(controller: str, root: Path, proc: Path) -> dict[int, list[Path]]:
    """Return the folders of this process's cgroup and its ancestors, by cgroup version.

    A container sees its own cgroup at the root of the mount. So each list ends with the mount, and
    leaves out folders that are not visible here.

    Args:
        controller: name of the version 1 controller: "cpu" or "memory".
        root: mount of version 2, parent of the mounts of version 1.
        proc: mount of procfs.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text("utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    by_version = {}
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            version, mount = 2, root
        elif controller in controllers.split(","):
            version, mount = 1, root / controller
        else:
            continue
        own = mount if ".." in path else mount / path.lstrip("/")
        folders = [own, *own.parents]
        visible = folders[: folders.index(mount) + 1]
        by_version[version] = [folder for folder in visible if folder == mount or folder.is_dir()]
    return by_version


def counters(path: Path) -> dict[str, int]:
    """Read lines of a name and a number; return an empty dict if there is no such file."""
    try:
        text = path.read_text("utf-8")
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
