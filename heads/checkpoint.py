"""Save and load heads. Folders are written whole or not at all; family and format are recognised by the tensors.

    save_head(head, "runs/first/head")
    head = load_head("runs/first")               # a run, a checkpoint, a head folder or a Hub id
    file = read_head("runs/first")               # the head with its format, its files, and contradictions in its config.json

heads/storage/weight_files.py reads and writes the files with the tensors. Does not know optimisers, engines or cards.
"""

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from unicodedata import category

import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError, LocalEntryNotFoundError

from .families import (
    SAFETENSORS_FILE,
    TORCH_FILE,
    WEIGHT_FILES,
    check_format,
    from_file,
    native_format,
    recognise,
    to_file,
)
from .storage.atomic_write import staged_folder
from .storage.hub_answer import ask_hub
from .storage.hub_id import check_may_be_id, near_folder, split_revision
from .storage.reading import UnknownVocabulary, assume
from .storage.tensor_checks import DTYPES
from .storage.weight_files import failing_as_oserror, find_weights, list_files, read_names, read_tensors, write_tensors

MAX_SHARD_SIZE = 5 * 10**9  # bytes
BEST = "best"  # in a run: the head that was measured best
TREE_FILE = "tree.json"  # the draft tree measured for a head may lie beside it


def save_head(
    head, folder, format=None, dtype=None, torch_file=False, lm_head_weight=None, max_shard_size=MAX_SHARD_SIZE
):
    """Write `head` into a new `folder`, whole or not at all.

    format: one of its family's formats (heads/families.py); None takes the family's own.
    dtype: the dtype to cast to (torch.dtype or its name); None keeps the head's.
    torch_file: also write the .pt that the original Medusa code reads (exports do, training checkpoints need not).
    lm_head_weight: the target's lm_head [V, H], which "vllm" and "speculators" store with heads that use it.
    max_shard_size: files above this number of bytes are split into shards, if readers of the format know shards.
    Raises ValueError (format, non-empty folder) and OSError (cannot write).
    """
    format = format or native_format(head)
    check_format(head, format)
    with staged_folder(folder) as staging:
        write_head(
            head,
            staging,
            format,
            dtype=dtype,
            torch_file=torch_file,
            lm_head_weight=lm_head_weight,
            max_shard_size=max_shard_size,
        )


def copy_head(head):
    """Copy a head's files, in its family's own format, to the host's memory.

    -> write(folder): writes them into an existing folder, which the caller stages. A thread may call it while the head changes.
    """
    format = native_format(head)
    tensors, config = to_file(head, format)
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return lambda folder: _write_files(tensors, config, folder, format)


def write_head(
    head, folder, format, *, dtype=None, torch_file=False, lm_head_weight=None, max_shard_size=MAX_SHARD_SIZE
):
    """Write the files of save_head into an existing folder, which the caller stages."""
    tensors, config = to_file(head, format, lm_head_weight)
    if dtype is not None:
        tensors = {name: _cast(tensor, to_dtype(dtype)) for name, tensor in tensors.items()}
    _write_files(tensors, config, folder, format, torch_file, max_shard_size)


def _write_files(tensors, config, folder, format, torch_file=False, max_shard_size=MAX_SHARD_SIZE):
    config = config | _dtype_keys(format, tensors)
    Path(folder, "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(tensors, Path(folder, SAFETENSORS_FILE[format]), max_shard_size)
    if torch_file and format in TORCH_FILE:
        path = Path(folder, TORCH_FILE[format])
        with failing_as_oserror(path), path.open("wb") as file:
            torch.save(tensors, file)


def _dtype_keys(format, tensors):
    """The keys of config.json that name the dtype, in both spellings: without them readers take float32 or float16.

    None in FasterDecoding's files, whose readers take the target's.
    """
    if format in TORCH_FILE:
        return {}
    name = str(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def _cast(tensor, dtype):
    """Weights in another dtype; integer tensors (d2t) keep theirs."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class HeadFile:
    """A head that was read, with facts about its files."""

    folder: Path
    weight_files: tuple[Path, ...]
    format: str  # the layout found: one of FORMATS, or one that is only read
    head: torch.nn.Module
    dtype: torch.dtype  # the head's
    stored_dtypes: frozenset  # dtypes of the tensors in the files
    notes: tuple[str, ...]  # where config.json is wrong or silent, or was overruled by the tensors


def load_head(path_or_id, dtype=None):
    """Load a head of any family from a head folder, a run, a checkpoint or a Hub id, in any format of heads/families.py.

    Warns where config.json contradicts the tensors or lacks a key. Otherwise as read_head.
    """
    file = read_head(path_or_id, dtype)
    for note in file.notes:
        warnings.warn(f"{file.folder}: {note}", stacklevel=2)
    return file.head


def read_head(path_or_id, dtype=None):
    """Read a head and the facts about its files: a HeadFile. resolve_head finds it.

    dtype: torch.dtype or its name; None keeps the file's.
    An EAGLE head whose file holds no embedding needs the target's (`needs_embedding`, `take_embedding`).
    Raises ValueError: it names the file and its fault (cut, damaged, tensors missing, unexpected or misshapen), or, where nothing
    was found, what was tried.
    """
    folder = resolve_head(path_or_id)
    path = find_weights(folder)
    config = read_config(folder)
    tensors = read_tensors(path)
    notes = []
    try:
        try:
            kind, reading = from_file(tensors, config)
        except UnknownVocabulary:  # published Medusa heads with a shared lm_head
            target = config.get("base_model_name_or_path")
            config["vocab_size"] = _target_vocab_size(target)
            assume(notes, "vocab_size", config["vocab_size"], f"as the target {target} has it")
            kind, reading = from_file(tensors, config)
        _check_target_name(reading.config.base_model_name_or_path)
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        if dtype is None and len(dtypes) > 1:
            firsts = {tensor.dtype: name for name, tensor in tensors.items() if tensor.is_floating_point()}
            mixed = ", ".join(sorted(f"{name} {str(one).removeprefix('torch.')}" for one, name in firsts.items()))
            raise ValueError(
                f"its tensors are of different dtypes ({mixed}): load them as one with dtype=, or write them so with heads.export "
                "--dtype"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # Memory without values: no random numbers are drawn for weights that the file gives.
    with torch.device("meta"):
        head = kind(reading.config)
    if head.state_dict().keys() - reading.state.keys() == {"embed_tokens.weight"}:
        head.embed_tokens = None  # the target's embedding: head.take_embedding gives it
    if "embed_tokens.weight" in reading.state:
        head.embedding_is_targets = reading.embedding_is_targets
    dtype = next(iter(dtypes)) if dtype is None else to_dtype(dtype)
    head = head.to(dtype).to_empty(device="cpu")
    # Copies: blocks that share a tensor in the file become separate, and the file may change afterwards.
    head.load_state_dict(reading.state)
    notes += reading.notes + _dtype_note(config, dtypes)
    return HeadFile(
        folder, list_files(path), reading.format, head, dtype=dtype, stored_dtypes=frozenset(dtypes), notes=tuple(notes)
    )


def _check_target_name(name):
    """ValueError unless a target's name can be one."""
    if name is not None and not (
        isinstance(name, str) and not any(category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name)
    ):
        raise ValueError(f"the target that its config names, {name!r:.80}, is not the name of a folder or repository")


def _dtype_note(config, found):
    """[a note] if config.json, in either spelling of the key, names another dtype than that of the tensors."""
    names = {str(dtype).removeprefix("torch.") for dtype in found}
    said = config.get("dtype") or config.get("torch_dtype")
    if said is None or {str(said).removeprefix("torch.")} == names:
        return []
    return [f'config.json says "dtype": {said!r}; the tensors are {", ".join(sorted(names))}']


def to_dtype(dtype):
    """torch.dtype from itself or its name ("bfloat16"); ValueError for anything that is not floating point."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known: expected float32, bfloat16 or float16")
    return found


def read_config(folder):
    """config.json of a head folder as a dict; ValueError naming the file if it is missing or broken."""
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a head is a config.json and its weights") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    return config


def resolve_head(path_or_id):
    """The local folder that holds a head's files.

    A run gives its `best/`, else its `head/`, else the head of its newest checkpoint; a checkpoint gives its `head/`; a head
    folder gives itself. Anything else is taken for a Hub id, OWNER/NAME or OWNER/NAME@REVISION, and its head's files are fetched.
    """
    folder = Path(path_or_id)
    if not folder.is_dir():
        return _fetch_head(str(path_or_id))
    steps = [(int(match[1]), path) for path in folder.glob("checkpoints/step-*") if (match := _STEP.search(path.name))]
    newest_first = [path / "head" for _, path in sorted(steps, reverse=True)]
    # head/ before the folder itself: a checkpoint may keep other weights beside it.
    for candidate in (folder / BEST, folder / "head", folder, *newest_first):
        if find_weights(candidate):
            return candidate
    raise ValueError(
        f"{folder} holds no head: looked for {', '.join(WEIGHT_FILES)} in it, in {BEST}/, in head/ and in checkpoints/step-*/head/"
    )


def describe_choice(source, folder):
    """A sentence if `folder`, of resolve_head, is the best head of the run `source` and not the one of its end; else ""."""
    if folder.name != BEST or folder.resolve() == Path(source).resolve():
        return ""
    last = Path(source, "head")
    other = f"{last} is that of the end" if last.is_dir() else f"{Path(source, 'checkpoints')} holds newer ones"
    return f"{source}: taking {folder}, the head that was measured best; {other}"


_STEP = re.compile(r"^step-(\d+)$")


def find_head(folder):
    """The folder with the head's files: `folder` itself, or one inside a run or a checkpoint; None if there is no head."""
    folder = Path(folder)
    try:
        if not (folder / "config.json").is_file():
            folder = resolve_head(folder)
        read_config(folder)
        path = find_weights(folder)
        return folder if path and recognise(read_names(path)) else None
    except ValueError:
        return None


def _fetch_head(path_or_id):
    """Download a head's files from the Hub (or find them in its cache) and return their folder."""
    check_may_be_id(path_or_id)
    repo_id, revision = split_revision(path_or_id)
    hub = ask_hub()
    try:
        folder = _fetch(repo_id, "config.json", revision, hub).parent
        commit = folder.name  # commit of the cached folder: a branch may move in the meantime
        for name in WEIGHT_FILES:
            missing = _missing(repo_id, name, commit, hub)
            if missing is None:
                for path in list_files(folder / name):
                    _fetch(repo_id, path.name, commit, hub)
                if (
                    isinstance(_missing(repo_id, TREE_FILE, commit, hub), LocalEntryNotFoundError)
                    and not constants.HF_HUB_OFFLINE
                ):
                    warnings.warn(
                        f"the Hub did not answer whether {repo_id} has a {TREE_FILE}: going on without one",
                        stacklevel=2,
                    )
                return folder
        raise missing
    except (OSError, ValueError, HTTPError, EntryNotFoundError) as error:
        # Where only the cache was searched, the library's error just says to check the connection.
        known = hub.local_files_only and isinstance(error, LocalEntryNotFoundError)
        raise ValueError(
            f"no head at {path_or_id!r}: there is no such folder{near_folder(path_or_id)}, and {hub.words} gave no "
            f"config.json with one of {', '.join(WEIGHT_FILES)}{'' if known else f': {type(error).__name__}: {_first_line(error)}'}"
        ) from error


def _fetch(repo_id, name, revision, hub):
    """The local path of a file of a repository.  hub: a HubAnswer"""
    return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=hub.local_files_only))


def _missing(repo_id, name, revision, hub):
    """Fetch a file that a repository may not have: None, or the error that says so."""
    try:
        _fetch(repo_id, name, revision, hub)
    except EntryNotFoundError as error:
        return error


def _first_line(error):
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def _target_vocab_size(target):
    """vocab_size of the target that a published head with a shared lm_head names."""
    try:
        local = bool(target) and Path(target).is_dir()
        path = Path(target, "config.json") if local else _fetch(target, "config.json", None, ask_hub())
        return json.loads(path.read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, TypeError, KeyError, HTTPError) as error:
        raise ValueError(
            f'config.json has no "vocab_size" and the target it names ({target!r}) could not tell it '
            f'({_first_line(error)}): add "vocab_size" to config.json'
        ) from None


def check_head_fits(head, target_config):
    """ValueError, naming both sides, if the head was made for another target: hidden size, vocabulary, or aux layers.

    target_config: the target's transformers config (of a multimodal one, its text part counts).
    """
    wrong = head.mismatches(target_config.get_text_config())
    if wrong:
        trained_for = head.config.base_model_name_or_path or "a target it does not name"
        raise ValueError(f"the head (made for {trained_for}) does not fit this target: it has {' and '.join(wrong)}")
