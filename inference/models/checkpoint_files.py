"""Find the safetensors files of a model and read their headers, with clear errors if there are none.

A folder or a Hub id in Hugging Face layout: model.safetensors, or model.safetensors.index.json and the shards it names. Headers
are read first, so that names, shapes, dtypes and lengths are known before any tensor is touched.
Not supported: .bin, .pt and GGUF files (the errors say how to convert).
"""

import json
import zlib
from pathlib import Path

from huggingface_hub import hf_hub_download, list_repo_files
from huggingface_hub.errors import EntryNotFoundError, HTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from ...heads.storage.hub_answer import ask_hub
from ...heads.storage.user_errors import list_names

BLOCK, NUM_BLOCKS = 4096, 64  # bytes of a file that a checksum reads at once, and how often
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def find_files(folder_or_id, revision=None):
    """The safetensors files of a model: a folder's, or those of a Hub id from the Hub or its cache.

    Raises ValueError naming the expected files; for checkpoints of other formats it says how to convert them.
    """
    folder = Path(folder_or_id)
    if folder.is_dir():
        single, index = folder / SINGLE_FILE, folder / INDEX_FILE
        if single.is_file():
            return [single]
        if not index.is_file():
            raise ValueError(_no_safetensors(folder_or_id, [path.name for path in folder.iterdir()]))
        names = read_index(index)
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(
                f"{folder} lacks {list_names(missing)}, which its {INDEX_FILE} names: copy or download it again"
            )
        return [folder / name for name in names]
    if folder.exists():
        raise ValueError(f"{folder} is a file: expected a model folder in Hugging Face layout, or a Hub id")
    return _fetch_files(str(folder_or_id), revision)


def _fetch_files(repo_id, revision):
    hub = ask_hub()

    def fetch(name):
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=hub.local_files_only))

    try:
        try:
            return [fetch(SINGLE_FILE)]
        except EntryNotFoundError:  # also: offline and not in the cache
            try:
                index = fetch(INDEX_FILE)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                names = list_repo_files(repo_id, revision=revision)
                raise ValueError(_no_safetensors(repo_id, names)) from None
        return [fetch(name) for name in read_index(index)]
    except (OSError, HTTPError, EntryNotFoundError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"cannot get the weights of {repo_id!r}: there is no such folder, and {hub.words} gave "
            f"no {SINGLE_FILE} or {INDEX_FILE} with its shards: {type(error).__name__}: {reason}"
        ) from error


def _no_safetensors(model, names):
    """The error text for a model whose files `names` hold no safetensors."""
    expected = f"expected {SINGLE_FILE}, or {INDEX_FILE} and its shards"
    if "adapter_config.json" in names:
        return f"{model} holds an adapter, not a model ({expected}): merge it into its base model (merge_and_unload) and save that"
    others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
    if not others:
        return f"{model} holds no weights: {expected}"
    return (
        f"{model} holds its weights as {list_names(others)}, which the engine does not read ({expected}). Convert once with "
        f'transformers: AutoModelForCausalLM.from_pretrained("{model}", dtype="auto").save_pretrained("NEW_FOLDER"), and copy '
        "the tokenizer's files along"
    )


def read_index(path):
    """The shards that an index names, in the order of their names; ValueError naming the file if it is broken."""
    try:
        index = json.loads(Path(path).read_text(encoding="utf-8"))
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no 'weight_map' from tensors to shards")
        shards = sorted(set(map(str, weight_map.values())))
        if any(Path(name).name != name for name in shards):
            raise ValueError("a shard lies in another folder")
    except ValueError as error:
        raise ValueError(f"{path} is not an index of safetensors shards: {error}; copy or download it again") from None
    return shards


def read_header(path):
    """{tensor: (dtype, shape)} of a safetensors file; ValueError naming it if it is cut short or no such file.

    The format: 8 bytes little-endian length of the header, the header as JSON, then the tensors' bytes.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path} is a Git LFS pointer, not the weights themselves: fetch them with `git lfs pull`")
        length = int.from_bytes(start, "little")
        try:
            header = json.loads(file.read(length) if 8 + length <= size else b"")
            header.pop("__metadata__", None)
            entries = {
                name: (*map(entry.get, ("dtype", "shape")), *entry["data_offsets"]) for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path} ({size} bytes) is cut short or no safetensors file: it has no readable header"
            ) from None
    for name, (*_, end) in sorted(entries.items(), key=lambda item: item[1][-1]):
        if 8 + length + end > size:
            raise ValueError(
                f"{path} is cut short: it has {size} bytes and {name} ends at {8 + length + end}; copy or download it again"
            )
    return {name: (dtype, tuple(shape)) for name, (dtype, shape, _, _) in entries.items()}


def sample_checksum(files):
    """crc32 of the files' names, sizes and a sample of their blocks: with a few reads it tells weights apart."""
    checksum = 0
    for path in map(Path, files):
        size = path.stat().st_size
        checksum = zlib.crc32(f"{path.name} {size}".encode(), checksum)
        with path.open("rb") as file:
            for i in range(NUM_BLOCKS):
                file.seek(i * size // NUM_BLOCKS)
                checksum = zlib.crc32(file.read(BLOCK), checksum)
    return checksum


def open_file(path):
    """The opened file. Its tensors are views: nothing is read, or takes memory, until it is used."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy or download it again") from None
