"""Cache of the target's features of all rows, computed once for many epochs, for resumed runs and for several runs.

    DIR/cache.json                   description of the features: rows, target, layers, precision, shapes
    DIR/shard-00000.safetensors      `states` [r, T, S, H] of the rows from 0 on, and for float8 `scales` [r, T, S]; its header
                                     names its cache and the checksum of its bytes

A shard is written aside and renamed, so it exists whole or not at all; a fill that was killed goes on with the missing shards. When
a cache is opened, the ranks together read every shard once and compare its checksum; a damaged shard is computed again. The row
length alone decides which rows are computed together, so a cache holds the same bits whatever the number of processes. On several
machines DIR must be a folder that all of them see. Not done here: features of some of the rows, removing a shared cache.

float8 is e4m3 with one fp32 scale per token and stream: the largest value becomes 448. Values down to 2^-14 of the largest keep
4 bits (relative error at most 2^-4), so a few channels that are a thousand times larger do not harm the rest.

Letters: R rows, T tokens per row, H hidden size, A residual streams asked for, S = 1 + A streams, r rows of a shard, B of a batch.
"""

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import zlib
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from ...heads.storage.atomic_write import is_partial, staged_file

OWN_FOLDER = "features"  # in a run folder, if the recipe names no cache; RunFolder.finish removes it
MANIFEST = "cache.json"
SHARD_BYTES = 1 << 27  # of states: the most that a killed process loses, and the memory of making a shard
TOKENS_PER_FORWARD = 4096  # fills a GPU with an 8B target; part of what decides the last bits of a cache
SAMPLES = 64  # number of values of every parameter in a target's hash
TOLD = "headstart"  # key in a shard's header, for its cache and the checksum of its tensors

_SHARD = re.compile(r"shard-(\d+)\.safetensors")
_LAYOUT = ("format", "rows_per_forward", "rows_per_shard")  # taken from an existing cache
_FLOAT8 = torch.float8_e4m3fn


def cache_features(run, recipe, target, *, packed, stop, layers=()):
    """The complete FeatureCache of all rows; None if `stop` (StopSignals) ended its filling early. Written shards stay.

    run: RunFolder; layers: their streams are kept beside the last states. Raises ValueError as FeatureCache does.
    """
    dtype = target.dtype if recipe.cache_dtype == "auto" else getattr(torch, recipe.cache_dtype)
    folder = recipe.feature_cache or run.path / OWN_FOLDER
    cache = FeatureCache(folder, describe(target, packed, dtype, layers), target.dtype, run.accelerator, run.note)
    return cache if cache.fill(target, packed, stop) else None


def describe(target, packed, dtype, layers=()):
    """The description of a cache of these rows: the content of cache.json, a dict of scalars and lists."""
    num_rows, row_length = len(packed), packed.row_length
    num_streams = 1 + len(layers)
    batch = max(TOKENS_PER_FORWARD // row_length, 1)
    batch_bytes = batch * row_length * num_streams * target.hidden_size * dtype.itemsize
    return {
        "format": 1,
        "rows": _hash_rows(packed),
        "target": _hash_target(target.model, target.limits_within(row_length)),
        "target_name": str(target.model.config.name_or_path),
        "layers": list(layers),
        "dtype": str(dtype).removeprefix("torch."),
        "num_rows": num_rows,
        "row_length": row_length,
        "num_streams": num_streams,
        "hidden_size": target.hidden_size,
        "rows_per_forward": batch,
        "rows_per_shard": batch * max(SHARD_BYTES // batch_bytes, 1),
    }


def to_float8(states):
    """[..., H] -> (float8 [..., H], fp32 scales [...]); their product approximates the states."""
    largest = states.abs().amax(-1).float()
    scales = torch.where(largest > 0, largest / torch.finfo(_FLOAT8).max, 1.0)
    return (states.float() / scales[..., None]).to(_FLOAT8), scales


class FeatureCache:
    """A folder of shards. Opened by __init__, completed by `fill`, read by `rows`."""

    def __init__(self, folder, description, target_dtype, accelerator, note):
        """Make or open the cache in `folder`; first `note(text)` tells how much disk it takes.

        description: of `describe`; target_dtype: the dtype that `rows` returns. Raises ValueError, before anything is written, if
        the folder holds other files or another cache (naming the differences), or if the disk is too small.
        """
        self.folder, self.accelerator, self.note = Path(folder), accelerator, note
        self.target_dtype = target_dtype
        self.description = self._agree(description)
        self.dtype = getattr(torch, self.description["dtype"])
        self._check_disk()
        accelerator.wait_for_everyone()  # every rank has looked before any rank writes
        if accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            if not (self.folder / MANIFEST).exists():
                self._put(MANIFEST, (json.dumps(self.description, indent=2) + "\n").encode())
        accelerator.wait_for_everyone()
        self.description = self._agree(description)  # another run may have made the cache
        self.shards = []

    def _agree(self, wanted):
        """`wanted` in the layout of an existing cache of the same features, if there is one."""
        path = self.folder / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            inside = sorted(p.name for p in self.folder.iterdir()) if self.folder.is_dir() else []
            foreign = [name for name in inside if not _SHARD.fullmatch(name) and not is_partial(name)]
            if foreign or (self.folder.exists() and not self.folder.is_dir()):
                held = f"holds {', '.join(foreign[:3])}" if foreign else "is a file"
                raise ValueError(
                    f"feature_cache {str(self.folder)!r} {held}, and is not a feature cache: name a folder of its own"
                ) from None
            return wanted
        except ValueError as error:
            raise ValueError(f"{path} is not the JSON that was written ({error}): remove {self.folder}") from None
        if found.get("format") != wanted["format"]:
            raise ValueError(
                f"{path} is of format {found.get('format')!r}, this version reads {wanted['format']}: name another feature_cache"
            )
        names = [name for name in wanted if name not in (*_LAYOUT, "target_name")]
        different = [
            f"{name} {found.get(name)!r}, now {wanted[name]!r}" for name in names if found.get(name) != wanted[name]
        ]
        if different:
            raise ValueError(
                f"the feature cache {str(self.folder)!r} (of {found.get('target_name')}) is of something else than "
                f"this run asks for: {'; '.join(different)}. rows follow from data, tokenizer, seed, max_tokens, row_length and "
                "eval_prompts, the target from its weights. Give the run what the cache was made with, or another feature_cache"
            )
        return found

    def _check_disk(self):
        """Say how much disk the cache takes; ValueError if that is more than is free."""
        d = self.description
        width = d["num_streams"] * d["hidden_size"]
        scales = 4 * d["num_streams"] if self.dtype == _FLOAT8 else 0  # bytes per token
        total = d["num_rows"] * d["row_length"] * (width * self.dtype.itemsize + scales)
        there = sum(path.stat().st_size for path in self.folder.glob("shard-*.safetensors"))
        nearest = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(nearest).free
        self.note(
            f"feature cache: {d['num_rows']} rows x {d['row_length']} tokens x {width} values in {d['dtype']} take "
            f"{total / 1e6:,.0f} MB of disk in {self.folder}; {there / 1e6:,.0f} MB are there, {free / 1e6:,.0f} MB free"
        )
        if total - there > free:
            raise ValueError(
                f"the feature cache needs {(total - there) / 1e9:.1f} GB more and {self.folder} has {free / 1e9:.1f} GB free: set "
                "cache_features to false (features are then computed as they are needed), lower max_tokens, or name a "
                "feature_cache on a larger disk"
            )

    def _remove_leftovers(self):
        """Remove the unfinished files of killed processes; those of a run that is filling now are locked."""
        for path in self.folder.iterdir():
            if is_partial(path.name):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    @property
    def num_shards(self):
        return -(-self.description["num_rows"] // self.description["rows_per_shard"])

    def _path(self, shard):
        return self.folder / f"shard-{shard:05d}.safetensors"

    def fill(self, target, packed, stop):
        """Compute the missing or damaged shards, divided over the ranks, and open all of them; called on every rank.

        target: FrozenTarget; packed: DocumentRows or PackedRows. Returns False if `stop` (StopSignals) ended it early.
        """
        missing = self._find_missing()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        left = sum(self._num_rows(shard) for shard in missing)
        with tqdm(total=left, desc="features", unit="row", disable=rank > 0 or not left, dynamic_ncols=True) as bar:
            for first in range(0, len(missing), world):
                turn = missing[first : first + world]
                tensors = self._compute(turn, target, packed, stop, bar)
                if tensors is None:
                    return False
                if rank < len(turn):
                    self._write(turn[rank], tensors)
        self.accelerator.wait_for_everyone()
        self.shards = [self._open(shard) for shard in range(self.num_shards)]
        return True

    def _find_missing(self):
        """Ids of the shards to compute, the same list on every rank; damaged shards are removed."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        there = [shard for shard in range(self.num_shards) if self._path(shard).exists()]
        self.accelerator.wait_for_everyone()
        damaged = []
        for shard in tqdm(there[rank::world], desc="checking features", unit="shard", disable=rank > 0 or not there):
            try:
                self._check(shard)
            except ValueError as error:
                damaged.append((shard, str(error)))
        damaged = dict(gather_object(damaged))
        for shard, reason in sorted(damaged.items()):
            self.note(f"{reason}: its rows are computed again")
            if self.accelerator.is_main_process:
                self._path(shard).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        whole = set(there) - damaged.keys()
        return [shard for shard in range(self.num_shards) if shard not in whole]

    def _num_rows(self, shard):
        size = self.description["rows_per_shard"]
        return min(size, self.description["num_rows"] - shard * size)

    def _compute(self, turn, target, packed, stop, bar):
        """The tensors of this rank's shard; None if `stop` came first.  turn: at most one shard per rank

        All ranks make the same number of forwards: a target divided over them needs all of them in each forward.
        """
        d, rank = self.description, self.accelerator.process_index
        first, count = (turn[rank] * d["rows_per_shard"], self._num_rows(turn[rank])) if rank < len(turn) else (0, 0)
        shape = count, d["row_length"], d["num_streams"]
        tensors = {"states": torch.empty(*shape, d["hidden_size"], dtype=self.dtype)}
        if self.dtype == _FLOAT8:
            tensors["scales"] = torch.empty(shape)
        for start in range(0, max(map(self._num_rows, turn)), d["rows_per_forward"]):
            if stop.agreed(self.accelerator):
                return None
            inside = slice(start, min(start + d["rows_per_forward"], count))  # empty if this rank's shard is done
            rows = slice(first + inside.start, first + inside.stop) if start < count else slice(0, 1)
            some = packed.select(rows)
            parts = some.input_ids, some.position_ids, some.document_ids
            batch = [part.to(self.accelerator.device) for part in parts]
            states = target.features(*batch, tuple(d["layers"])).unflatten(-1, (d["num_streams"], d["hidden_size"]))
            if start < count:
                if self.dtype == _FLOAT8:
                    states, scales = to_float8(states)
                    tensors["scales"][inside] = scales.cpu()
                tensors["states"][inside] = states.to(self.dtype).cpu()
            bar.update(sum(min(max(self._num_rows(shard) - start, 0), d["rows_per_forward"]) for shard in turn))
        return tensors

    def _write(self, shard, tensors):
        """Put a shard in its place, whole."""
        # One entry: the order of several differs between processes, and so would the files.
        told = f"{self._identity()} {checksum_of(tensors)}"
        self._put(self._path(shard).name, save(tensors, {TOLD: told}))

    def _put(self, name, content):
        """Write a file of the folder, whole or not at all. Raises OSError naming the file."""
        try:
            with staged_file(self.folder / name) as file:
                with contextlib.suppress(OSError):  # on a file system without locks unfinished files stay
                    fcntl.flock(file, fcntl.LOCK_EX)
                file.write(content)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; files written before are intact") from error

    def _identity(self):
        known_by = {name: value for name, value in self.description.items() if name != "target_name"}
        return _hash(json.dumps(known_by, sort_keys=True).encode())

    def _open(self, shard):
        """The tensors of a shard, memory-mapped. ValueError if the file is cut, or not of this cache."""
        path = self._path(shard)
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get(TOLD, "").partition(" ")[0] != self._identity():
                    raise ValueError(f"{path} is of another cache")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise ValueError(
                f"{path} is not there, though a process has written it: on several machines feature_cache must be a folder that "
                "all of them see"
            ) from None
        except SafetensorError as error:
            raise ValueError(f"{path} is cut short or damaged ({error})") from None

    def _check(self, shard):
        """ValueError unless the bytes of a shard are those that were written."""
        tensors, path = self._open(shard), self._path(shard)
        with safe_open(path, framework="pt") as file:
            expected = file.metadata()[TOLD].partition(" ")[2]
        if str(checksum_of(tensors)) != expected:
            raise ValueError(f"the bytes of {path} are not those that were written")

    def read(self, index, pinned=False):
        """What is kept of the rows `index` [B].  -> {name: tensor on the host}

        pinned: in memory that a GPU copies from by itself
        """
        found = {}
        for name, like in self.shards[0].items():
            found[name] = torch.empty(len(index), *like.shape[1:], dtype=like.dtype, pin_memory=pinned)
            for place, row in enumerate(map(int, index)):
                shard, offset = divmod(row, self.description["rows_per_shard"])
                found[name][place] = self.shards[shard][name][offset]
        return found

    def features(self, kept, device):
        """The features, in the target's dtype on `device`, of what `read` gave.  -> [B, T, S H]"""
        kept = {name: part.to(device, non_blocking=True) for name, part in kept.items()}
        states = kept["states"]  # [B, T, S, H]
        if self.dtype == _FLOAT8:
            states = states.float() * kept["scales"][..., None]
        return states.to(self.target_dtype).flatten(2)


def _hash(*contents):
    hashed = hashlib.sha256()
    for content in contents:
        hashed.update(content)
    return hashed.hexdigest()[:16]


def _hash_rows(packed):
    """Hash of all inputs of the target; the labels may differ."""
    names = "input_ids", "position_ids", "document_ids"
    return _hash(*(getattr(some, name).numpy() for name in names for some in packed.blocks()))


def _hash_target(model, limits):
    """Hash of the target's config and of some values of every parameter; reading all would take long. Called on every rank.

    limits: of `FrozenTarget.limits_within`, so that caches made when every layer saw whole documents are not taken for these.
    """
    config = model.config.to_diff_dict()
    volatile = ("transformers_version", "name_or_path", "use_cache")
    config = {name: value for name, value in config.items() if name not in volatile and not name.startswith("_")}
    contents = [json.dumps(config, sort_keys=True, default=str).encode(), *([limits.encode()] if limits else [])]
    for name, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        # An odd step: with an even one all values could come from the same column.
        sample = whole.detach().flatten()[:: whole.numel() // SAMPLES | 1].cpu().contiguous()
        contents += [f"{name} {tuple(whole.shape)} {whole.dtype}".encode(), sample.view(torch.uint8).numpy()]
    return _hash(*contents)


def checksum_of(tensors):
    """crc32 of the bytes of named tensors, as the header of a shard holds it."""
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].view(torch.uint8).numpy(), checksum)
    return checksum
