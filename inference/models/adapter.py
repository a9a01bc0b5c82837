"""LoRA adapters of a target, in peft's format: find them, check them against the target's tensors, add them to its weights.

    adapter = read_adapter("runs/medusa2")     # an adapter's folder, a head trained with one, a run, a checkpoint or a Hub id
    adapter.check_fits(shapes)                 # {name of the target's tensor: shape}
    merged = adapter.add_to(name, rows, first) # rows of the tensor `name`, from its row `first` on, in fp32 at least

    W' = W + alpha / r * B A          A [r, in], B [out, r]; alpha / sqrt(r) with use_rslora

The sum is made in fp32, on the CPU whatever the device, and rounded once. So a target merged while it is loaded has the same bits,
in the files' dtype, as a target merged into files before (hub_export/provenance.py). Refused as unsupported: DoRA and other
variants, initialisations that change the target's own weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA), biases, whole modules saved
with the adapter (modules_to_save), ranks that differ by layer, adapted embeddings, .bin files.
"""

import hashlib
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError

from ...heads.checkpoint import find_weights, read_tensors, resolve_head
from ...heads.storage.hub_answer import ask_hub
from ...heads.storage.hub_id import near_folder, split_revision
from ...heads.storage.user_errors import list_names

# peft's names of its two files, and our name of the adapter's folder inside a head's.
CONFIG_FILE, WEIGHTS_FILE, FOLDER = "adapter_config.json", "adapter_model.safetensors", "adapter"
# The key of a merged target's config.json that names its adapter.
MERGED_KEY = "merged_adapter"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Keys of an adapter's config with the values that mean plain LoRA.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    # With any other initialisation peft also changes the target's own weights when it loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


@dataclass(frozen=True)
class Adapter:
    """The low-rank changes of a target's weights.

    fingerprint: of its weights file; heads and merged targets name the adapter by it; pairs: {name of the target's tensor:
    (A [r, in], B [out, r])} in fp32; base: the target that the adapter names.
    """

    folder: Path
    fingerprint: str
    scaling: float
    pairs: dict
    base: str

    def check_fits(self, shapes):
        """ValueError unless every adapted tensor is among the target's {name: shape}, with a shape that fits A and B."""
        missing = [name for name in self.pairs if name not in shapes]
        wrong = []
        for name, (a, b) in self.pairs.items():
            expected = (b.shape[0], a.shape[1])
            if name in shapes and tuple(shapes[name]) != expected:
                wrong.append(f"{name} is {list(shapes[name])} in the target and {list(expected)} in the adapter")
        if missing or wrong:
            absent = [f"the target has no {list_names(missing)}"] if missing else []
            raise ValueError(
                f"the adapter {self.folder} (made for {self.base or 'a target it does not name'}) does not fit this target: "
                f"{'; '.join(absent + wrong[:3])}"
            )

    def add_to(self, name, rows, first):
        """Add the adapter's change to rows [n, in] of the target's tensor `name`, on the CPU, from row `first` on.

        In fp32 at least; rows of a tensor that is not adapted come back as they are.
        """
        if name not in self.pairs:
            return rows
        a, b = self.pairs[name]
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(wide) + ((b[first : first + len(rows)] @ a) * self.scaling).to(wide)


def read_adapter(source):
    """The Adapter of a folder, a head trained with one, a run, a checkpoint or a Hub id.

    Raises ValueError naming the part that is missing, damaged, or not plain LoRA.
    """
    folder = find_adapter(source)
    config = _read_config(folder / CONFIG_FILE)
    tensors = read_tensors(folder / WEIGHTS_FILE)
    rank, names = config["r"], {name.removesuffix(_A).removesuffix(_B) for name in tensors}
    strange = [name for name in tensors if not name.startswith(_PREFIX) or not name.endswith((_A, _B))]
    alone = [name for name in sorted(names) if not {name + _A, name + _B} <= tensors.keys()]
    if strange or alone or not tensors:
        problem = f"it holds {list_names(strange)}" if strange else f"one of A and B is missing of {list_names(alone)}"
        raise ValueError(
            f"{folder / WEIGHTS_FILE} holds no plain LoRA: {problem if tensors else 'it holds no tensors'}"
        )
    pairs = {}
    for name in sorted(names):
        a, b = tensors[name + _A].float(), tensors[name + _B].float()
        if a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == rank:
            raise ValueError(
                f"{folder / WEIGHTS_FILE}: {name.removeprefix(_PREFIX)} has A {list(a.shape)} and B {list(b.shape)}, and "
                f"{CONFIG_FILE} says rank {rank}: expected A [{rank}, in] and B [out, {rank}]"
            )
        pairs[f"{name.removeprefix(_PREFIX)}.weight"] = a, b
    alpha, root = config["lora_alpha"], config.get("use_rslora")
    scaling = alpha / (math.sqrt(rank) if root else rank)
    return Adapter(folder, fingerprint(folder), scaling, pairs, config.get("base_model_name_or_path") or "")


def choose_adapter(adapter, model, load_format, config):
    """The Adapter that an LLM is to merge into its model, or None; ValueError if the two do not fit.

    config: the model's.
    """
    if adapter is None:
        return None
    if not isinstance(adapter, str | Path):
        raise ValueError(f"adapter must be a folder, a run or a Hub id, got {adapter!r:.80}")
    if not isinstance(model, str | Path) or load_format != "auto":
        raise ValueError(
            "an adapter is merged into weights while they are read from files: give model as a folder or a Hub id (for a loaded "
            "module call peft's merge_and_unload first; another LLM shares its weights as they are)"
        )
    chosen = read_adapter(adapter)
    check_merged_once(chosen, getattr(config, MERGED_KEY, ""), model)
    return chosen


def check_merged_once(adapter, held, target):
    """ValueError if the weights of `target` already hold this adapter, or another adapter that this one was not made on top of.

    held: value of MERGED_KEY in the target's config.json, "" for none.
    """
    if held and (held == adapter.fingerprint or adapter.base != str(target)):
        which = "this adapter" if held == adapter.fingerprint else "an adapter"
        raise ValueError(
            f"{target} holds {which} ({held}) in its weights already, and {adapter.folder} was made for "
            f"{adapter.base or 'a target it does not name'}: leave the adapter out, or give the target that it was made for"
        )


def find_adapter(source):
    """The local folder of an adapter. `source` is that folder, or a head, run or checkpoint with an adapter.

    Anything that is not a folder is taken for the Hub id of an adapter, or of a head that was trained with one.
    """
    path = Path(source)
    if not path.is_dir():
        return _fetch_adapter(str(source))
    if (path / CONFIG_FILE).is_file():
        return path
    try:
        head = resolve_head(path)
    except ValueError:
        head = path
    if (head / FOLDER / CONFIG_FILE).is_file():
        return head / FOLDER
    what = "a head without one" if find_weights(head) and head != path else "no adapter"
    raise ValueError(
        f"{source} holds {what}: an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or lies as {FOLDER}/ beside the "
        "weights of a head that was trained with it"
    )


def has_adapter(head_folder):
    """Whether the head in this folder (as resolve_head gives it) was trained together with an adapter."""
    return Path(head_folder, FOLDER, CONFIG_FILE).is_file()


def find_adapter_of(head, source, folder):
    """The folder of the adapter that a head was trained with; None if it was trained without one.

    source: where the head was loaded from; folder: from resolve_head, which fetches only the head's own files of a Hub id.
    Raises ValueError if the adapter is gone.
    """
    if has_adapter(folder):
        return Path(folder, FOLDER)
    if not head.adapter:
        return None
    if Path(source).is_dir():
        raise ValueError(f"{folder} holds heads trained with an adapter, and no {FOLDER}/ beside them")
    # The commit of the head's files: the name of the cache's folder.
    return find_adapter(f"{split_revision(source)[0]}@{Path(folder).name}")


def fingerprint(folder):
    """The name of an adapter's weights: the beginning of the SHA-256 of their file."""
    with open(Path(folder, WEIGHTS_FILE), "rb") as file:
        return _name_of(hashlib.file_digest(file, "sha256"))


def fingerprint_of_bytes(content):
    """`fingerprint` of an adapter whose file of weights will hold these bytes."""
    return _name_of(hashlib.sha256(content))


def _name_of(digest):
    return digest.hexdigest()[:16]


def warn_unless_adapted(head, used):
    """Warn if a head was trained with an adapter that the target in use does not have.

    head: a module, or None; used: fingerprint of the adapter that is loaded or merged, "" for none. Outputs stay right, because the
    target decides every token. Only the drafts are worse than they could be.
    """
    trained_with = head.adapter if head is not None else ""
    if trained_with and trained_with != used:
        having = f"another one ({used})" if used else "none"
        warnings.warn(
            f"the head was trained together with the adapter {trained_with} of its target, and {having} is in use: its drafts are "
            "accepted less often. To decode the adapted target give adapter=... (--adapter), e.g. the run or folder of the head; a "
            "target that was merged by other means than heads.export --merge-adapter cannot be told apart",
            stacklevel=3,
        )


def _read_config(path):
    """adapter_config.json as a dict; ValueError unless it describes plain LoRA."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(config, dict) or not path.with_name(WEIGHTS_FILE).is_file():
        raise ValueError(f"{path.parent} holds no adapter: expected {CONFIG_FILE} and {WEIGHTS_FILE}")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            advice = ""
            if key == "init_lora_weights":
                advice = "; peft makes a plain one of it when it saves with path_initial_model_for_weight_conversion"
            raise ValueError(
                f"{path} says {key} = {config[key]!r}: only plain LoRA is supported ({key} = {plain[0]!r}){advice}"
            )
    for key, kinds in (("r", int), ("lora_alpha", (int, float))):
        if not isinstance(config.get(key), kinds) or config[key] <= 0:
            raise ValueError(f"{path} must say {key}, a number above 0, got {config.get(key)!r}")
    return config


def _fetch_adapter(name):
    """Download an adapter's two files (or find them in the cache), from the repository's root or from adapter/ in it."""
    repo_id, revision = split_revision(name)
    if repo_id.startswith((".", "/", "~")) or repo_id.count("/") > 1:
        raise ValueError(f"there is no adapter folder {name}")
    hub = ask_hub()

    def fetch(name, revision):
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=hub.local_files_only))

    for folder in ("", f"{FOLDER}/"):
        try:
            # The weights first: an adapter with its config in the cache counts as complete (has_adapter).
            place = fetch(folder + WEIGHTS_FILE, revision).parent
            # From the commit that names the cache's folder: a branch may move in the meantime.
            commit = (place.parent if folder else place).name
            return fetch(folder + CONFIG_FILE, commit).parent
        except EntryNotFoundError as error:
            reason = error
        except (OSError, ValueError, HTTPError) as error:
            reason = error
            break
    told = (str(reason).strip().splitlines() or ["no reason given"])[0]
    raise ValueError(
        f"no adapter at {name!r}: there is no such folder{near_folder(name)}, and {hub.words} gave no {CONFIG_FILE} with "
        f"{WEIGHTS_FILE}, neither as they are nor in {FOLDER}/"
        f"{'' if hub.local_files_only else f': {type(reason).__name__}: {told}'}"
    ) from reason
