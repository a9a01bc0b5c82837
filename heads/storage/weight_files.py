"""Read and write the files with a head's tensors: one file, or several shards with an index. No file can run code.

    path = find_weights(folder)          # model.safetensors, or model.safetensors.index.json, or ...
    tensors = read_tensors(path)
    write_tensors(tensors, folder / "model.safetensors", max_shard_size=5 * 10**9)

An index has the form that transformers and huggingface_hub write: {"weight_map": {tensor: shard}}. It is checked: every shard
exists and holds exactly the tensors that the index lists for it. Does not know what the tensors mean (heads/families.py does).
"""

import errno
import json
import textwrap
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..families import INDEX_SUFFIX, SHARDED_FILES, WEIGHT_FILES
from .user_errors import list_names


def find_weights(folder):
    """The weight file of a head folder, or its index where it is sharded, or None."""
    return next((path for name in WEIGHT_FILES if (path := Path(folder, name)).is_file()), None)


def list_files(path):
    """The files with the tensors, for a path from find_weights: the file itself, or its shards. ValueError for a damaged index."""
    path = Path(path)
    return tuple(path.parent / name for name in read_index(path)) if _is_index(path) else (path,)


def read_index(path):
    """{shard: names of its tensors} of an index; ValueError naming the file if it is not an index."""
    path = Path(path)
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = {}
        for name, shard in places.items():
            # A plain name: an index that somebody else wrote must not point outside its folder.
            if not isinstance(shard, str) or Path(shard).name != shard or Path(shard).suffix != _suffix(path):
                raise ValueError(f"tensor {name} lies in {shard!r}, expected a {_suffix(path)} file beside it")
            shards.setdefault(shard, []).append(name)
        if not shards:
            raise ValueError("it lists no tensor")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else "it has no weight_map of tensors to files"
        raise ValueError(f"{path} is not an index of weight files: {reason}") from None
    return shards


def read_names(path):
    """The tensor names of a weight file or an index, without reading values (it may be a whole target). ValueError if damaged.

    Only a .pt or .bin from before torch 1.6 is read whole.
    """
    path = Path(path)
    if _is_index(path):
        return [name for names in read_index(path).values() for name in names]
    if path.suffix != ".safetensors":
        return list(_read_file(path, mapped=zipfile.is_zipfile(path)))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error})") from None


def read_tensors(path):
    """{name: tensor} of a .safetensors, .pt or .bin file, or of all shards of an index.

    Raises ValueError naming the file that is missing, cut or damaged, and the tensors that a shard lacks or should not hold.
    """
    path = Path(path)
    if not _is_index(path):
        return _read_file(path)
    tensors, shards = {}, read_index(path)
    if missing := [shard for shard in shards if not (path.parent / shard).is_file()]:
        raise ValueError(f"{path} lists {list_names(missing)}, which {'is' if len(missing) == 1 else 'are'} missing")
    for shard, names in shards.items():
        found = _read_file(path.parent / shard)
        if lost := set(names) - found.keys():
            raise ValueError(f"{path.parent / shard} lacks {list_names(lost)}, which {path.name} says it holds")
        if extra := found.keys() - set(names):
            raise ValueError(f"{path.parent / shard} holds {list_names(extra)}, which {path.name} does not list for it")
        tensors |= found
    return tensors


def _read_file(path, mapped=False):
    """{name: tensor} of one file. mapped: values of a .pt or .bin stay on the disk until used; the file must outlive them."""
    path.open("rb").close()  # a file that may not be read raises its own error here, not "damaged" below
    try:
        if path.suffix in (".pt", ".bin"):
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        else:
            tensors = load_file(path)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise IndexError, KeyError, AssertionError, struct.error
        reason = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise ValueError(f"{path} cannot be read; it is cut short or damaged ({reason})") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{path} holds something other than named tensors")
    return tensors


def write_tensors(tensors, path, max_shard_size):
    """Write {name: tensor} to the .safetensors `path`, or in shards of at most `max_shard_size` bytes with an index beside it.

    Only files whose readers know shards are split (families.SHARDED_FILES); a tensor above that size gets its own shard. Raises
    OSError naming the file.
    """
    path = Path(path)
    if path.name not in SHARDED_FILES:
        return _write_file(tensors, path)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=f"{path.stem}{{suffix}}{path.suffix}", max_shard_size=max_shard_size
    )
    for shard, names in split.filename_to_tensors.items():
        _write_file({name: tensors[name] for name in names}, path.parent / shard)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        path.with_name(path.name + INDEX_SUFFIX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(tensors, path):
    with failing_as_oserror(path):
        path.touch()
        mode = path.stat().st_mode & 0o777
        save_file(tensors, path, metadata={"format": "pt"})
        # The library makes its file readable by the owner only; it must follow the umask like all other files.
        path.chmod(mode)


@contextmanager
def failing_as_oserror(path):
    """Raise OSError for a full disk, which neither library does: torch has the OSError only as the context of its own error."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        system = error.__context__ if isinstance(error.__context__, OSError) else None
        reason = system.strerror if system else (str(error).strip().splitlines() or ["no reason given"])[0]
        raise OSError(system.errno if system else errno.EIO, f"{path.name}: {reason}") from error


def _is_index(path):
    return path.name.endswith(INDEX_SUFFIX)


def _suffix(index):
    return Path(index.name.removesuffix(INDEX_SUFFIX)).suffix
