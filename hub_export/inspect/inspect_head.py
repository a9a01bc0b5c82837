"""`headstart inspect`: what a head is, whether it fits its target, and which engines take its files as they lie.

`describe` gives one dict, which `--json` prints and hub_export/inspect/inspect_text.py puts into lines. Reads the head, and of
its target config.json alone; measures nothing and writes nothing.
"""

import contextlib
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError

from ...heads.checkpoint import check_head_fits, read_config, read_head, resolve_head
from ...heads.draft_vocabulary import missing_stop_tokens
from ...heads.eagle3 import default_aux_layers
from ...heads.families import family_of, recognise, without_prefix
from ...heads.formats.eagle3 import LAYER_IDS
from ...heads.storage.hub_answer import ask_hub, hub_options
from ...heads.storage.hub_id import split_revision
from ...heads.storage.weight_files import find_weights, read_names
from ...inference.models.target_source import eos_token_ids, target_config
from ...inference.speculation.tree import GrowingTree, load_tree
from ..measurements import Measurements, check_tree_fits, find_measurements
from ..readers.readers import Verdict, judge
from ..readers.rules import WRONG, HeadFiles
from .inspect_text import as_text

# Keys of config.json by which heads are known whose config else looks like a model's.
HEADS_KEYS = ("medusa_num_heads", "speculators_model_type", "n_predict", "draft_vocab_size")


def inspect(source, model=None, as_json=False):
    """Print what `source` is.  Returns the exit status: 0, or 1 for a head that cannot be read, with what is wrong on stderr.

    source: whatever resolve_head takes; model: its target (folder or Hub id), None for the one it names.
    Raises ValueError where there is no head: nothing at all, or a model.
    """
    check_is_no_model(source)
    folder = resolve_head(source)
    try:
        found = describe(source, folder, model)
    except ValueError as error:
        print(f"headstart inspect: error: {error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"source": str(source), "folder": str(folder), "error": str(error)}, indent=2))
        return 1
    print(json.dumps(found, indent=2) if as_json else as_text(found))
    return 0


def check_is_no_model(source):
    """ValueError, before anything large is read or fetched, for a model given in a head's place."""
    folder = Path(source)
    config = _config_of(folder, str(source))
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    depth = text.get("num_hidden_layers")
    if type(depth) is not int or depth < 2 or config.get("model_type") == "medusa":
        return
    if any(key in config for key in HEADS_KEYS):
        return
    if folder.is_dir():
        # A head may carry its target's config: the names of tensors tell.
        path = find_weights(folder)
        if path is not None and recognise(read_names(path)):
            return
    name = (config.get("architectures") or [config.get("model_type", "a model")])[0]
    raise ValueError(
        f"{source} is a model, not a head: its config.json says {name} with {depth} layers. Name a head, and the model it was made "
        f"for with --model {source}"
    )


def _config_of(folder, source):
    """config.json of a folder or a Hub id as a dict; {} where there is none to be read (resolve_head says what is wrong)."""
    try:
        if not folder.is_dir():
            repo_id, revision = split_revision(source)
            path = hf_hub_download(repo_id, "config.json", revision=revision, **hub_options(source))
            folder = Path(path).parent
        return read_config(folder)
    except (OSError, ValueError, HTTPError, EntryNotFoundError):
        return {}


def describe(source, folder, model=None):
    """What is to be known of the head in `folder`, as a dict of plain values.

    source: how it was named; model: its target, None for the one it names. Raises ValueError for a head that cannot be read.
    """
    file = read_head(folder)
    head, config = file.head, read_config(folder)
    names = {name for path in file.weight_files for name in read_names(path)}
    names, prefix = without_prefix(dict.fromkeys(names))
    beside = _file_names(source, folder)
    problems = list(file.notes)
    try:
        measured = find_measurements(folder, source)
        tree = None if measured.tree is None else _tree(measured.tree)
    except ValueError as error:
        problems.append(str(error))
        measured, tree = Measurements(), None
    if tree is not None:
        try:
            check_tree_fits(head, measured.tree)
        except ValueError as error:
            problems.append(str(error))
    name = model or head.config.base_model_name_or_path or (measured.recipe or {}).get("target") or ""
    target, depth = _target(head, name)
    if target["fits"] is not None and target["why"]:
        problems.append(target["why"])
    files = HeadFiles(
        head=head,
        format=file.format,
        config=config,
        tensors=frozenset(names),
        files=frozenset(beside),
        path=str(folder if Path(source).is_dir() else source),
        num_layers=depth,
        prefix=prefix,
    )
    engines = [_engine(verdict, source, head) for verdict in judge(files)]
    return {
        "source": str(source),
        "folder": str(folder),
        "family": family_of(head).name,
        "format": file.format,
        "problems": problems,
        "mend": _export(source, file.format, head) if file.notes else None,
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in file.weight_files],
        "beside": sorted(beside - {path.name for path in file.weight_files}),
        "dtype": _name(file.dtype),
        "num_speculative_tokens": head.num_speculative_tokens,
        "config": asdict(head.config),
        "target": target,
        "adapter": head.adapter or None,
        "features": _features(head, depth),
        "lm_head": _lm_head(head),
        "embedding": _embedding(head),
        "parameters": _parameters(head, names),
        "draft_bytes": _draft_bytes(head, target),
        "tree": tree,
        "measured": _measured(measured),
        "engines": [_engine(Verdict("Headstart", True), source, head), *engines],
    }


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _target(head, name):
    """(What is known of the target, its number of layers or None)."""
    target = {"name": name, "fits": None, "why": "", "dtype": None}
    if not name:
        return target | {"why": "the head names none: give --model to check whether it fits"}, None
    try:
        config, _ = target_config(name, "auto")
    except ValueError as error:
        return target | {"why": f"not checked, {error}"}, None
    text = config.get_text_config()
    if getattr(config, "dtype", None) is not None:
        target["dtype"] = _name(config.dtype)
    try:
        check_head_fits(head, config)
    except ValueError as error:
        return target | {"fits": False, "why": str(error)}, text.num_hidden_layers
    if getattr(head, "draft_token_ids", None) is not None:  # else there is nothing to ask a Hub for
        target["why"] = missing_stop_tokens(head, eos_token_ids(name, config, None)) or ""
    return target | {"fits": True}, text.num_hidden_layers


def _features(head, depth):
    """What it reads of the target; of streams their layers in each counting, None where the target's depth must tell them."""
    if family_of(head).name != "EAGLE-3":
        return {"kind": "final"}
    ids = head.config.aux_layer_ids
    if ids is None and depth is not None and depth >= 7:
        ids = default_aux_layers(depth)
    return {
        "kind": "streams",
        "named_by_file": head.config.aux_layer_ids is not None,
        "entering_layers": None if ids is None else list(ids),
        f"sglang_{LAYER_IDS}": None if ids is None else [id - 1 for id in ids],
    }


def _lm_head(head):
    family, config = family_of(head).name, head.config
    if family == "EAGLE" or (family == "Medusa" and config.shared_lm_head):
        return "the target's"
    if family == "EAGLE-3":
        return "own"
    return "own, one for all steps" if getattr(config, "tie_weights", False) else f"own, one per {_unit(family)}"


def _unit(family):
    return "head" if family == "Medusa" else "step"


def _embedding(head):
    """Where the embedding of drafted tokens comes from; None: the family has none."""
    family = family_of(head).name
    if family == "Medusa":
        return None
    if family == "MLP speculator":
        return "own, one for all steps" if head.config.tie_weights else "own, one per step"
    if head.needs_embedding:
        return "the target's, not in the file"
    return "own" if head.embed_tokens.weight.requires_grad else "the target's, a copy in the file"


def _parameters(head, names):
    """How many numbers were trained, and how many are the target's, carried along."""
    trained = sum(one.numel() for one in head.parameters() if one.requires_grad)
    carried = sum(one.numel() for one in head.parameters() if not one.requires_grad)
    if family_of(head).name == "Medusa" and head.config.shared_lm_head and "lm_heads.0.weight" in names:
        carried += head.config.vocab_size * head.config.hidden_size
    return {"trained": trained, "carried": carried}


def _draft_bytes(head, target):
    """Bytes of weights that drafting reads (Head.draft_bytes); the target's lm_head in its dtype, else the
    head's."""
    config, dtype = head.config, next(head.parameters()).dtype
    lm_head_dtype = getattr(torch, target["dtype"] or "", dtype)
    lm_head = config.vocab_size * config.hidden_size * lm_head_dtype.itemsize if _lm_head(head) == "the target's" else 0
    return head.draft_bytes(lm_head) | {"target_lm_head": lm_head}


def _tree(path):
    tree = load_tree(path)
    kind = "dynamic" if isinstance(tree, GrowingTree) else "static"
    return {"file": path.name, "kind": kind, "num_nodes": tree.num_nodes, "max_depth": tree.max_depth}


def _measured(measured):
    """The figures that came along: acceptance per temperature, and the rows of the benchmark."""
    keys = ("temperature", "acceptance_length", "per_position", "num_steps", "source", "prompts")
    found = {"step": measured.step, "acceptance": [{key: one.get(key) for key in keys} for one in measured.acceptance]}
    if measured.benchmark:
        found["benchmark"] = {key: measured.benchmark.get(key) for key in ("hardware", "date", "rows")}
    return found


def _engine(verdict, source, head):
    """A reader's verdict with the command that mends it. "silent": what it computes wrong without a word."""
    problems = [(kind, text.replace("`", "")) for kind, text in verdict.problems]
    return {
        "name": verdict.reader.replace("`", ""),
        "loads": verdict.loads,
        "how": verdict.how.replace("`", ""),
        "problems": [text for _, text in problems],
        "silent": [text for kind, text in problems if kind == WRONG and verdict.loads],
        "notes": [text.replace("`", "") for text in verdict.notes] if verdict.loads else [],
        "mend": _export(source, verdict.mend, head) if verdict.mend else None,
        "stays": [text.replace("`", "") for _, text in verdict.stays],
    }


def _export(source, format, head):
    """The command that writes the head anew."""
    # What an export cannot know by itself: the target, where the head names none.
    base = "" if head.config.base_model_name_or_path else " --base-model OWNER/NAME"
    return f"heads.export {shlex.quote(str(source))} --format {format}{base} --output DIR"


def _file_names(source, folder):
    """Names of the files beside the head: its folder's; of a Hub id the repository's, of which only the head's were fetched."""
    if not Path(source).is_dir() and not ask_hub().local_files_only:
        repo_id, revision = split_revision(source)
        with contextlib.suppress(OSError, HTTPError):
            return {file.rfilename for file in HfApi().model_info(repo_id, revision=revision).siblings or ()}
    return {path.name for path in folder.iterdir()}
