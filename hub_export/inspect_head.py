"""`headstart inspect`: describe a head, check that it fits its target, and list the engines that take its files unchanged.

`describe` returns one dict, which `--json` prints and `as_text` turns into lines: faults, the head's properties, its readers. It
reads the head and its target's config.json only; it measures nothing and writes nothing.
"""

import contextlib
import json
import shlex
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import torch
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError

from ..heads.checkpoint import check_head_fits, read_config, read_head, resolve_head
from ..heads.draft_vocabulary import missing_stop_tokens
from ..heads.families import FAMILIES, FORMATS, NAMED_FAMILIES, family_of, native_format, recognise, without_prefix
from ..heads.storage.hub_answer import ask_hub, hub_options
from ..heads.storage.hub_id import split_revision
from ..heads.storage.weight_files import find_weights, read_names
from ..inference.models.target_source import eos_token_ids, target_config
from ..inference.speculation.tree import load_tree
from .measurements import Measurements, find_measurements
from .readers.readers import WRONG, HeadFiles, Verdict, judge, rules_of

# Keys of config.json that mark a head whose config otherwise looks like a model's.
HEADS_KEYS = ("medusa_num_heads", "speculators_model_type", "n_predict", "draft_vocab_size", "dflash_config")
WIDTH = 118  # of the text
INDENT = 12  # column of values, after their names
NAME, ANSWER = 28, 9  # columns of the engines


def inspect(source, model=None, as_json=False):
    """Print the description of `source`.  Returns the exit status: 0, or 1 for an unreadable head, with its fault on stderr.

    source: as resolve_head takes it; model: its target (folder or Hub id), None for the target it names.
    Raises ValueError if there is no head: nothing at all, or a model.
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
    """ValueError, before anything large is read or fetched, for a model given instead of a head."""
    folder = Path(source)
    config = _config_of(folder, str(source))
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    depth = text.get("num_hidden_layers")
    if type(depth) is not int or depth < 2 or any(key in config for key in HEADS_KEYS):
        return
    if any(name == config.get("model_type") for name in NAMED_FAMILIES):
        return
    if folder.is_dir():
        # A head may have its target's config: the names of its tensors decide.
        path = find_weights(folder)
        if path is not None and recognise(read_names(path)):
            return
    name = (config.get("architectures") or [config.get("model_type", "a model")])[0]
    raise ValueError(
        f"{source} is a model, not a head: its config.json says {name} with {depth} layers. Name a head, and the model it was made "
        f"for with --model {source}"
    )


def _config_of(folder, source):
    """config.json of a folder or a Hub id as a dict; {} if it cannot be read (resolve_head then reports the fault)."""
    try:
        if not folder.is_dir():
            repo_id, revision = split_revision(source)
            path = hf_hub_download(repo_id, "config.json", revision=revision, **hub_options(source))
            folder = Path(path).parent
        return read_config(folder)
    except (OSError, ValueError, HTTPError, EntryNotFoundError):
        return {}


def describe(source, folder, model=None):
    """The properties of the head in `folder`, as a dict of plain values.

    source: the name that the user gave; model: its target, None for the target it names. Raises ValueError for an unreadable head.
    """
    file = read_head(folder)
    head, config = file.head, read_config(folder)
    family = family_of(head)
    rules = rules_of(family)
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
    lm_head, embedding = rules.tables(head)
    return {
        "source": str(source),
        "folder": str(folder),
        "family": family.name,
        "format": file.format,
        "problems": problems,
        "mend": _export(source, file.format if file.format in FORMATS else native_format(head), head)
        if file.notes
        else None,
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in file.weight_files],
        "beside": sorted(beside - {path.name for path in file.weight_files}),
        "dtype": _name(file.dtype),
        "num_speculative_tokens": head.num_speculative_tokens,
        "config": asdict(head.config),
        "target": target,
        "adapter": head.adapter or None,
        "features": rules.features(head, depth),
        "lm_head": lm_head,
        "embedding": embedding,
        "parameters": _parameters(head, names),
        "draft_bytes": _draft_bytes(head, target),
        "tree": tree,
        "left_out": [str(path) for path in measured.left_out],
        "measured": _measured(measured),
        "engines": [_engine(Verdict("Headstart", True), source, head), *engines],
    }


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _target(head, name):
    """({facts of the target}, its number of layers or None)."""
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
    if head.draft_token_ids is not None:  # else nothing is needed from the Hub
        target["why"] = missing_stop_tokens(head, eos_token_ids(name, config, None)) or ""
    return target | {"fits": True}, text.num_hidden_layers


def _parameters(head, names):
    """Number of trained parameters, and of the target's parameters in the files."""
    trained = sum(one.numel() for one in head.parameters() if one.requires_grad)
    carried = sum(one.numel() for one in head.parameters() if not one.requires_grad)
    if head.uses_target_lm_head and {"lm_heads.0.weight", "lm_head.weight"} & names.keys():
        carried += head.config.vocab_size * head.config.hidden_size
    return {"trained": trained, "carried": carried}


def _draft_bytes(head, target):
    """Bytes of weights that drafting reads (Head.draft_bytes); the target's lm_head in its dtype if known, else the head's."""
    config, dtype = head.config, next(head.parameters()).dtype
    lm_head_dtype = getattr(torch, target["dtype"] or "", dtype)
    lm_head = config.vocab_size * config.hidden_size * lm_head_dtype.itemsize if head.uses_target_lm_head else 0
    return head.draft_bytes(lm_head) | {"target_lm_head": lm_head}


def _tree(path):
    tree = load_tree(path)
    kind = "dynamic" if tree.grows else "static"
    return {"file": path.name, "kind": kind, "num_nodes": tree.num_nodes, "max_depth": tree.max_depth}


def _measured(measured):
    """The figures beside the head: acceptance per temperature, and the rows of the benchmark."""
    keys = ("temperature", "acceptance_length", "per_position", "num_steps", "source", "prompts")
    found = {"step": measured.step, "acceptance": [{key: one.get(key) for key in keys} for one in measured.acceptance]}
    if measured.benchmark:
        found["benchmark"] = {key: measured.benchmark.get(key) for key in ("hardware", "date", "rows")}
    return found


def _engine(verdict, source, head):
    """A reader's verdict with the command that mends it. "silent": what it computes wrong without an error."""
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
    """The command that exports the head again."""
    # An export cannot find out the target of a head that names none.
    base = "" if head.config.base_model_name_or_path else " --base-model OWNER/NAME"
    return f"heads.export {shlex.quote(str(source))} --format {format}{base} --output DIR"


def _file_names(source, folder):
    """Names of the files beside the head: in its folder, or in the repository of a Hub id (only the head's files are fetched)."""
    if not Path(source).is_dir() and not ask_hub().local_files_only:
        repo_id, revision = split_revision(source)
        with contextlib.suppress(OSError, HTTPError):
            return {file.rfilename for file in HfApi().model_info(repo_id, revision=revision).siblings or ()}
    return {path.name for path in folder.iterdir()}


def as_text(found):
    """The lines of a description.  found: of describe"""
    family = {family.name: family for family in FAMILIES}[found["family"]]
    lines = [f"{found['source']}: {rules_of(family).title(found['config'])}"]
    lines += _wrong_lines(found)
    lines.append("")
    for name, value in _facts(found):
        lines += textwrap.wrap(f"{name:{INDENT}}{value}", WIDTH, subsequent_indent=" " * INDENT)
    lines += ["", "engines, and these files as they lie"]
    for engine in found["engines"]:
        lines += _engine_lines(engine)
    return "\n".join(lines)


def _wrong_lines(found):
    """Faults, shown first: a wrong config.json, a target that does not fit, readers that compute something else silently."""
    silent = [f"{_short(one)}: {text}" for one in found["engines"] for text in one["silent"]]
    lines = []
    for title, texts in (
        ("wrong", found["problems"]),
        ("loads there, and silently drafts worse than it could", silent),
    ):
        if texts:
            lines += ["", title]
            for text in texts:
                lines += textwrap.wrap(f"! {text}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        if title == "wrong" and found["mend"]:
            lines.append(f"    a config.json that says what the tensors say: {found['mend']}")
    return lines


def _facts(found):
    files = ", ".join(f"{one['name']} ({_bytes(one['bytes'])})" for one in found["files"])
    also = [name for name in found["beside"] if name.endswith((".safetensors", ".pt", ".bin"))]
    yield "format", f"{found['format']}, {found['dtype']}: {files}" + (f"; also {', '.join(also)}" if also else "")
    if found["folder"] != found["source"]:
        yield "folder", found["folder"]
    yield "target", _target_line(found)
    if found["adapter"]:
        yield "adapter", f"trained together with the adapter {found['adapter']} of its target"
    yield "reads", _features_line(found["features"])
    yield "sizes", _sizes_line(found)
    embedding = f"; embedding: {found['embedding']}" if found["embedding"] else ""
    yield "lm_head", found["lm_head"] + embedding
    parameters = found["parameters"]
    carried = f", and {parameters['carried']:,} of the target's carried along" if parameters["carried"] else ""
    yield "parameters", f"{parameters['trained']:,} trained{carried}"
    yield "draft", _draft_line(found)
    tree = found["tree"]
    beside = f"{tree['kind']}, {tree['num_nodes']} nodes, {tree['max_depth']} deep ({tree['file']})" if tree else None
    yield "tree", beside or f"none beside it (it drafts a chain of {found['num_speculative_tokens']})"
    if found["left_out"]:
        yield "left out", f"{' and '.join(found['left_out'])}: measured on other weights of that run"
    yield "measured", _measured_line(found["measured"])


def _target_line(found):
    target = found["target"]
    if not target["name"]:
        return target["why"]
    if target["fits"]:
        return f"{target['name']}: it fits"
    return f"{target['name']}: {'IT DOES NOT FIT, see above' if target['fits'] is False else target['why']}"


def _features_line(features):
    if features["kind"] == "final":
        return "the target's last hidden state, after the final norm"
    ids = features["entering_layers"]
    if ids is None:
        return (
            "what enters the target's layers 2, n//2, n-3 (the file names none, and the target's depth n is not known)"
        )
    less = [id - 1 for id in ids]
    named = "" if features["named_by_file"] else "; the file names none, these are the default"
    counted = f"(vLLM, transformers' hidden_states: the same; SGLang: {_list(less)})"
    return f"what enters the target's layers {_list(ids)} {counted}{named}"


def _list(numbers):
    return ", ".join(map(str, numbers))


def _sizes_line(found):
    config = found["config"]
    parts = [f"hidden {config['hidden_size']}"]
    if config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        parts.append(f"target's hidden {config['target_hidden_size']}")
    parts.append(f"vocabulary {config['vocab_size']}")
    if config.get("draft_vocab_size"):
        whole = config["draft_vocab_size"] == config["vocab_size"]
        parts.append("all of it drafted" if whole else f"{config['draft_vocab_size']} of it drafted")
    if "inner_size" in config:
        parts += [f"inner {config['inner_size']}", f"scale_input {str(config['scale_input']).lower()}"]
    if "head_dim" in config:
        heads = f"{config['num_attention_heads']} heads over {config['num_key_value_heads']} of {config['head_dim']}"
        scaling = (config["rope_scaling"] or {}).get("rope_type")
        rope = f"rope {config['rope_theta']:g}{f' ({scaling})' if scaling else ''}"
        parts += [f"MLP {config['intermediate_size']}", heads, rope]
        flags = ("attention_bias", "fc_bias", "norm_before_residual", "is_causal", "sample_from_anchor", "confidence")
        parts += [name for name in flags if config.get(name)]
    blocks = {"edge_rank": "edge of rank {edge_rank}", "conv_kernel_size": "convolutions over {conv_kernel_size} slots"}
    blocks["selector_rank"] = "selector of rank {selector_rank} among {selector_top_k} tokens"
    parts += [text.format(**config) for key, text in blocks.items() if config.get(key)]
    return ", ".join(parts)


def _draft_line(found):
    read, lm_head = found["draft_bytes"], found["draft_bytes"]["target_lm_head"]
    of_target = f" ({_bytes(lm_head)} of them the target's lm_head)" if lm_head else ""
    after = f", after a step {_bytes(read['advance'])}" if "advance" in read else ""
    if "level" not in read:
        depth = found["num_speculative_tokens"]
        return f"reads {_bytes(read['first'])} of weights{of_target} for all {depth} depths at once{after}"
    in_level, in_first = (of_target, "") if read["level"] >= lm_head else ("", of_target)
    return f"a level reads {_bytes(read['level'])} of weights{in_level}, the first {_bytes(read['first'])}{in_first}{after}"


def _measured_line(measured):
    parts = [] if measured["step"] is None else [f"checkpoint of step {measured['step']}"]
    for one in measured.get("acceptance") or ():
        rates = ", ".join(f"{rate:.2f}" for rate in one["per_position"] or ())
        how = "" if one["source"] == "engine" else ", teacher-forced"
        length = "unknown" if one["acceptance_length"] is None else f"{one['acceptance_length']:.2f}"
        parts.append(f"acceptance length {length} at temperature {one['temperature']:g}{how} (per position {rates})")
    if not measured.get("acceptance"):
        parts.append("no acceptance beside it")
    rows = [row for row in (measured.get("benchmark") or {}).get("rows") or () if row.get("speedup")]
    if rows:
        best = max(rows, key=lambda row: row["speedup"])
        parts.append(f"at best {best['speedup']:.2f} times plain decoding ({measured['benchmark'].get('hardware')})")
    return "; ".join(parts)


def _engine_lines(engine):
    answer = "no" if not engine["loads"] else "yes, but" if engine["problems"] else "yes"
    texts = engine["notes"] if engine["loads"] else engine["problems"] or [engine["how"]]
    if engine["loads"]:
        how = engine["how"].removeprefix("yes").removeprefix(", ")
        texts = [*([how] if how else []), *(["see above"] if engine["silent"] else []), *texts]
    before = 2 + NAME + ANSWER
    lines = textwrap.wrap("; ".join(texts), WIDTH - before) or [""]
    if engine["mend"]:
        lines.append(engine["mend"])  # never wrapped, so that it can be copied
    if engine["stays"]:
        lines += textwrap.wrap(f"(what stays: {'; '.join(engine['stays'])})", WIDTH - before)
    lines[0] = f"  {_short(engine):{NAME}}{answer:{ANSWER}}{lines[0]}".rstrip()
    return [lines[0], *(" " * before + line for line in lines[1:])]


def _short(engine):
    return engine["name"].removeprefix("the ").split(" (")[0]


def _bytes(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
