"""Reads what `torch.save(model.state_dict(), file)` wrote, without torch and without trusting it.

Such a file is a zip archive: one pickle that describes the tensors, and one uncompressed entry
for each storage. A pickle can run any code, so this reader knows a handful of names and refuses
all others. The tensors stay in the file, memory-mapped.
"""

import pickle  # nosec B403: only through _Unpickler, which resolves few names
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specops.models.errors import ModelError

Tensor = NDArray[Any]

_DTYPES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")  # keys of training checkpoints
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")  # of DistributedDataParallel, torch.compile
_LOCAL_HEADER = 30  # bytes of a zip entry's header before its name
_SIGNATURE = b"PK\x03\x04"


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name, memory-mapped, in the order of the file.

    The state dict may also be part of a training checkpoint, under a key such as `model`. Names
    lose the prefixes that wrappers of the model added.

    Raises:
        ModelError: the file is not such an archive, contains more than tensors, or is damaged.
        OSError: it cannot be read.
    """
    if not zipfile.is_zipfile(file):
        raise ModelError(
            f"{file} is not an archive of torch.save: it is damaged, or older than PyTorch 1.6; "
            "load it with torch and save it again"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            (description,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            root = description.removesuffix("data.pkl")
            if root + "byteorder" in archive.namelist():
                order = archive.read(root + "byteorder")
                if order != b"little":
                    raise ModelError(f"{file} was written big-endian: save it again")
            with archive.open(description) as stream:
                content = _Unpickler(stream, file, archive, root).load()
    except ModelError:
        raise
    except (
        *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError),
        *(OSError, RuntimeError),  # a wrong offset; versions and ciphers that zipfile lacks
    ) as error:
        raise ModelError(f"{file} is damaged ({error}): save or download it again") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file} contains no state dict that can be read ({error}): save it with "
            "torch.save(model.state_dict(), file)"
        ) from error
    tensors = _tensors(content)
    if not tensors:
        raise ModelError(
            f"{file} contains no state dict: save one with torch.save(model.state_dict(), file)"
        )
    return tensors


def _tensors(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    own = {
        _PREFIXES.sub("", name): value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, np.ndarray)
    }
    if own:
        return own
    inner = (_tensors(content[key]) for key in _WRAPPERS if key in content)
    return next((tensors for tensors in inner if tensors), {})


class _Unpickler(pickle.Unpickler):
    """Resolves the names that a state dict needs, and no others."""

    def __init__(self, stream: Any, file: Path, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(stream)
        self._file = file
        self._archive = archive
        self._root = root

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a name of torch, or raise ModelError for any other name."""
        match module, name:
            case ("collections", "OrderedDict"):
                return OrderedDict
            case ("torch._utils", "_rebuild_tensor_v2"):
                return _rebuild_tensor
            case ("torch._utils", "_rebuild_parameter"):
                return lambda data, *_: data
            case ("torch", storage) if storage in _DTYPES:
                return storage
        raise ModelError(
            f"{self._file} needs {module}.{name}, which is not loaded for safety: save only the "
            "weights, with torch.save(model.state_dict(), file)"
        )

    def persistent_load(self, pid: Any) -> Tensor:
        """Return a storage [numel] of the file."""
        kind, storage, key, _, numel = pid
        if kind != "storage":
            raise ValueError(f"unknown reference {kind!r}")
        dtype = np.dtype(_DTYPES[storage])
        entry = self._archive.getinfo(f"{self._root}data/{key}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < numel * dtype.itemsize:
            raise ValueError(f"storage {key} is compressed or cut short")
        if numel == 0:
            return np.empty(0, dtype)
        return np.memmap(self._file, dtype, "r", self._offset(entry), (numel,))

    def _offset(self, entry: zipfile.ZipInfo) -> int:
        """Return where an entry's bytes begin, by the header in front of them."""
        with self._file.open("rb") as stream:
            stream.seek(entry.header_offset)
            header = stream.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or not header.startswith(_SIGNATURE):
            raise ValueError(f"the header of {entry.filename} is damaged")
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        offset = entry.header_offset + _LOCAL_HEADER + name + extra
        if offset + entry.file_size > self._file.stat().st_size:
            raise ValueError(f"{entry.filename} is cut short")
        return offset


def _rebuild_tensor(
    storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Tensor:
    """Return a view into a storage; torch gives offset and strides in elements."""
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise ValueError(f"a tensor of shape {size} and strides {stride} cannot be")
    if 0 in size:
        return np.empty(size, storage.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= len(storage):
        raise ValueError(f"a tensor of shape {size} reaches beyond its storage")
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)
