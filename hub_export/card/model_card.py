"""The model card (README.md) of an export: what the head is, what was measured on it, how to use it, who reads it.

Every figure comes from a file beside the source (hub_export/measurements.py); a figure that is not there is said to be
absent. Paths of this machine are not written.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.utils import validate_repo_id

from ...heads.families import family_of
from ..acceptance import intervals
from ..origin import Origin
from ..readers.readers import readers_table
from .acceptance_table import acceptance_table, eval_results, short
from .commands import split_name, usage
from .plots import CAPTIONS, FOLDER

# family -> (tag, what the card calls such a head, arXiv number of its paper)
PAPERS = {
    "Medusa": ("medusa", "Medusa heads", "2401.10774"),
    "MLP speculator": ("mlp-speculator", "MLP speculator", "2404.19124"),
    "EAGLE": ("eagle", "EAGLE head", "2401.15077"),
    "EAGLE-3": ("eagle3", "EAGLE-3 head", "2503.01840"),
}


@dataclass(frozen=True)
class Extras:
    """What lies beside the weights of an export: for the card to tell.

    plots: names of drawings; tokenizer: names of the target's tokenizer files; target_license: what the target's card says;
    license_text: whether LICENSE is there; holds: what of the target's weights the files hold copies of, in words; origin: the
    head that it was converted or exported again from (hub_export/origin.py), whose licence counts where none is given
    """

    plots: tuple = ()
    tokenizer: tuple = ()
    target_license: str | None = None
    license_text: bool = False
    holds: str = ""
    origin: Origin | None = None


def model_card(head, format, name, measured, license=None, dtype_changed=False, extras=Extras()):
    """The text of README.md.

    name: how the export is called to load it (OWNER/NAME, OWNER/NAME@BRANCH or a folder's name); measured: Measurements of its
    source; dtype_changed: the export holds another dtype than the source the figures were measured with.
    """
    target = target_name(head.config.base_model_name_or_path)
    tree = "static" if measured.tree is not None else "chain"
    sections = [
        _front_matter(head, name, measured, license, extras.origin),
        f"# {_title(name)}\n\n{_summary(head, format, target, bool(measured.recipe), extras.origin)}",
        f"## Measured\n\n{_measured(measured, dtype_changed, extras)}",
        f"## Use it\n\n{usage(head, format, name, target, tree, bool(_adapted(head, target)))}",
        f"## Which readers take it\n\n{_readers(head, format)}",
        f"## How it was trained\n\n{_recipe(measured, extras.origin)}",
        f"## Licence\n\n{_license(head, license, target, extras)}",
    ]
    return "\n\n".join(sections) + "\n"


def _title(name):
    return Path(split_name(name)[0]).name


def is_hub_id(name):
    """Whether `name` can be the "owner/name" of the Hub: the form fits and it is no folder here."""
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return name.count("/") == 1 and not Path(name).exists()


def target_name(base_model):
    """The target as a card may name it: a Hub id, a relative path, or the last part of an absolute one."""
    if not base_model:
        return "TARGET"
    # An absolute path would tell where it lay on the machine that trained; a relative one is how the reader names it, too.
    return base_model if is_hub_id(base_model) or not Path(base_model).is_absolute() else Path(base_model).name


def _front_matter(head, name, measured, license, origin):
    base_model, data = head.config.base_model_name_or_path, str((measured.recipe or {}).get("data", ""))
    results = eval_results(measured.acceptance)
    if not os.path.exists(data):
        data = data.partition(":")[0]  # without the split
    inherited = origin.license if origin else {}
    stated = {"license": license} if license else inherited or {"license": "other", "license_name": "not-stated"}
    fields = ModelCardData(
        model_name=_title(name),
        base_model=base_model if is_hub_id(base_model) else None,
        datasets=[data] if is_hub_id(data) else None,
        library_name="headstart",
        license=stated["license"],
        license_name=stated.get("license_name"),
        license_link=stated.get("license_link"),
        pipeline_tag="text-generation",
        tags=["headstart", PAPERS[family_of(head).name][0], "speculative-decoding"],
        metrics=["acceptance_length"] if results else None,
        eval_results=results or None,
    )
    return f"---\n{fields.to_yaml()}\n---"


def _summary(head, format, target, trained, origin):
    done = "trained and exported" if trained else "exported"
    config, depth = head.config, head.num_speculative_tokens
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    _, kind, paper = PAPERS[family_of(head).name]
    count, verb = (
        (f"{depth} ", "draft up to")
        if family_of(head).name == "Medusa"
        else ("An " if kind[0] in "EM" else "A ", "drafts")
    )
    rows = "\n".join(f"| {name} | {value} |" for name, value in _shape(head))
    hidden_size = config.target_hidden_size if family_of(head).name == "EAGLE-3" else config.hidden_size
    return (
        f"{count}{kind} ([arXiv {paper}](https://arxiv.org/abs/{paper})) that {verb} {depth} tokens ahead for the target "
        f"`{target}`, {done} with Headstart. In Headstart's engine the target checks every drafted token, and the "
        f"output is the one it gives without them.{f' {origin.text}' if origin else ''}\n\n"
        f"{_adapted(head, target)}"
        "| | |\n|---|---|\n"
        f"| target | `{target}`: hidden size {hidden_size}, vocabulary {config.vocab_size} |\n"
        f"{rows}\n"
        f"| parameters | {num_parameters:,} in {dtype} |\n"
        f"| format | `{format}` |"
    )


def _adapted(head, target):
    """What there is to say of heads that were trained together with an adapter of their target."""
    if not head.adapter:
        return ""
    return (
        f"**They belong to the adapted target**: they were trained together with a LoRA adapter of `{target}` (Medusa-2), which "
        f"lies in `adapter/` in peft's format (weights `{head.adapter}`). With it the output is the one that the adapted "
        f"target gives without the heads, which is not that of `{target}` itself; without it their drafts are accepted less often."
        "\n\n"
    )


def _shape(head):
    """(name, value) of what a family's heads differ in."""
    config, family = head.config, family_of(head).name
    if family == "Medusa":
        lm_head = "the target's lm_head, shared" if config.shared_lm_head else "an lm_head of its own per head"
        return [("residual blocks per head", config.num_layers), ("logits", lm_head)]
    if family == "MLP speculator":
        shared = "shared by all steps" if config.tie_weights else "one set per step"
        return [("inner size", config.inner_size), ("weights", shared)]
    if family == "EAGLE":
        return [("logits", "the target's lm_head")]
    layers = (
        "the default ones of the target" if config.aux_layer_ids is None else ", ".join(map(str, config.aux_layer_ids))
    )
    return [("reads what enters the target's layers", layers), ("draft vocabulary", config.draft_vocab_size)]


def _measured(measured, dtype_changed, extras):
    parts = []
    if measured.step is not None:
        parts.append(f"These heads are the checkpoint of training step {measured.step}; the figures are of that step.")
    if dtype_changed:
        parts.append("The figures were measured before the weights were cast to this export's dtype.")
    if measured.acceptance:
        ranges = [intervals(one["by_request"])[0] if one.get("by_request") else None for one in measured.acceptance]
        parts.append(acceptance_table(measured.acceptance, ranges))
    else:
        parts.append("Acceptance: no measurement came along.")
    parts.append(_benchmark(measured.benchmark) if measured.benchmark else "Speed: no benchmark came along.")
    if measured.tree is not None:
        parts.append(_tree(measured.tree_content))
    parts += [f"![{Path(name).stem}]({FOLDER}/{name})\n\n{CAPTIONS[name]}" for name in extras.plots]
    return "\n\n".join(parts)


def _tree(content):
    """What there is to say of tree.json."""
    if "dynamic" in content:
        dynamic = content["dynamic"]
        what = f"grown in every step, {dynamic['num_nodes']} nodes, up to {dynamic['max_depth']} deep"
    else:
        what = f"static, {len(content['parents'])} nodes, its root among them"
    promised = content.get("expected_acceptance_length")
    chosen = content.get("choice")
    text = f"Draft tree (`tree.json`, which Headstart finds by itself): {what}."
    if promised is not None:
        text += f" By the measured rates it promises {promised:.2f} tokens per step."
    if chosen:
        text += f" Chosen as the fastest for {chosen['batch_size']} request(s) at once on {chosen['hardware']}, {chosen['dtype']}."
    return text


COLUMNS = {
    "draft": "draft",
    "temperature": "temperature",
    "num_nodes": "nodes",
    "acceptance_length": "tokens per step",
    "tokens_per_second": "tokens/s",
    "speedup": "against plain decoding",
    "identical": "tokens identical to plain decoding",
}


def _benchmark(benchmark):
    lines = [
        f"Speed, on {benchmark.get('hardware', 'unnamed hardware')} ({benchmark.get('date', 'no date')}), by "
        f"`{benchmark.get('command', 'headstart bench')}`:",
        "",
        f"| {' | '.join(['heads', *COLUMNS.values()])} |",
        f"|{'---|' * (len(COLUMNS) + 1)}",
    ]
    for row in benchmark.get("rows") or ():
        cells = [short(row.get(key)) for key in COLUMNS]
        lines.append(f"| {' | '.join([str(row.get('head', '-')), *cells])} |")
    return "\n".join(lines)


def _readers(head, format):
    lines = ["| reader | takes these files |", "|---|---|"]
    lines += [f"| {reader} | {takes} |" for reader, takes in readers_table(head, format)]
    return "\n".join(lines)


def _recipe(measured, origin):
    if not measured.recipe:
        return "No recipe came along" + (f"; {origin.card}, {origin.link}, may have it." if origin else ".")
    shown = yaml.safe_dump(measured.recipe, sort_keys=False, allow_unicode=True)
    return f"The run's resolved configuration:\n\n```yaml\n{shown}```"


def _license(head, license, target, extras):
    """What may be said of it truthfully: who exported or published the head names its licence, and the target's is its makers'."""
    origin = extras.origin
    card, inherited = (origin.card, origin.license_name) if origin else ("", None)
    if license:
        said = f"The head is published under `{license}`{', as whoever exported it says' if origin else ''}"
    elif inherited:
        said = f"The head is published under `{inherited}`, as {card} says"
    else:
        said = "Whoever exported the head named no licence for it"
        said += f", and none was found in {card}" if origin and not origin.again else ""
    said += "; its text is in `LICENSE`." if extras.license_text else "."
    said += f" {card[0].upper()}{card[1:]} says `{inherited}`." if license and inherited else ""
    theirs = f"`{extras.target_license}`, as its card says" if extras.target_license else "named in its own repository"
    parts = [said, f"The licence of `{target}` is {theirs}."]
    if extras.holds:
        parts.append(f"These files hold {extras.holds} of the target, to which the target's licence applies.")
    elif family_of(head).name in ("Medusa", "EAGLE-3") and not getattr(head.config, "shared_lm_head", False):
        parts.append(
            "No tensor here is a copy of the target's, but the output matrices may have been started from its lm_head, and "
            "the target's licence may have a say in what is made from it."
        )
    else:
        parts.append("No tensor here is a copy of the target's; they were trained on what it computes.")
    if extras.tokenizer:
        parts.append("The tokenizer files are the target's, copied, for readers that look for them here.")
    return " ".join(parts)
