"""Keeps the paths that a repository's file names inside its folder, since the file is not trusted.

A path that a person gives may be a link to anywhere; a path that a file names may not.
"""

import json
from pathlib import Path, PurePosixPath

from specops.models.errors import ModelError


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in `folder` or below it; the file need not exist.

    A link may lead to another place of the folder. If the folder is a snapshot in huggingface_hub's
    cache, a link may also lead to the blobs of the same repository there.

    Raises:
        ValueError: `name` is absolute, contains `..`, is a link that leads out of the folder, or
            cannot be the name of a file.
    """
    relative = PurePosixPath(name)
    if not relative.parts or relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{name!r} is not a file in the folder")
    path, root = folder / relative, folder.resolve()
    try:
        path.is_file()  # raises if no file can have this name
        real = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"{name[:100]!r} is not a file in the folder ({error})") from error
    if not any(real.is_relative_to(allowed) for allowed in (root, *_blobs(root))):
        raise ValueError(
            f"{path} is a link to {real}, which is outside of the folder: put the file itself there"
        )
    return path


def indexed(index: Path) -> list[Path]:
    """Return the shards of weights that an index lists, all in the index's folder.

    Raises:
        ModelError: the file is no index, or names a file elsewhere.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        listed = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise ValueError("key 'weight_map' is missing or empty")
        names = sorted({str(name) for name in listed.values()})
        for name in names:
            if PurePosixPath(name).name != name:
                raise ValueError(f"{name!r} is not a file in the same folder")
        return [path_inside(index.parent, name) for name in names]
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{index}: {error}") from error


def _blobs(folder: Path) -> list[Path]:
    """Return the folder of blobs that a snapshot in huggingface_hub's cache links to.

    The layout is `models--org--name/snapshots/COMMIT/…` and `models--org--name/blobs`.
    """
    return [
        above.parent / "blobs"
        for above in folder.parents
        if above.name == "snapshots" and above.parent.name.startswith("models--")
    ]
