"""The model card (README.md) of an export and its drawings: the head, its figures, its use, its readers.

Every figure comes from a file beside the source (hub_export/measurements.py); the card says which figures are missing.
It names no paths of this machine.
"""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.utils import validate_repo_id

from ..evaluation.acceptance_lines import breaks
from ..evaluation.charts import as_file, heat_map, line_chart, tree_drawing
from ..heads.families import family_of
from .acceptance import acceptance_table, eval_results, intervals, short
from .provenance import Origin
from .readers.readers import engine_commands, readers_table, rules_of, split_name

PROMPT = "Write a function that reads a file."
PLOTS = "plots"  # folder of the drawings; each is drawn if its figures exist
# File -> caption, in the card's order.
CAPTIONS = {
    "acceptance.svg": "Acceptance per drafted token: the share of steps in which the first, second, … drafted token was accepted.",
    "rates.svg": "How often the target's token is the head's candidate of a rank, given that everything before it was accepted.",
    "tree.svg": "The draft tree, from the root downwards; the number is the rank among the siblings.",
    "loss.svg": "Training loss of each head, or of each step of a head that drafts step by step.",
    "training.svg": "Acceptance length while training.",
}


@dataclass(frozen=True)
class Extras:
    """Further facts for the card: of the weights as written, and of the files beside them."""

    license: str | None = None  # as given
    dtype_changed: bool = False  # whether the figures were measured in another dtype than the export's
    plots: tuple = ()  # names of drawings
    tokenizer: tuple = ()  # names of the target's tokenizer files
    target_license: str | None = None  # from the target's card
    license_text: bool = False  # whether LICENSE is there
    holds: str = ""  # the target's weights that the files hold copies of, in words
    origin: Origin | None = None  # source of the head, whose licence counts if none is given


def model_card(head, format, name, measured, extras):
    """The text of README.md.

    name: the name that loads the export (OWNER/NAME, OWNER/NAME@BRANCH or a folder's name); measured: Measurements of its
    source.
    """
    target = target_name(head.config.base_model_name_or_path)
    tree = "static" if measured.tree is not None else "chain"
    sections = [
        _front_matter(head, name, measured, extras),
        f"# {_title(name)}\n\n{_summary(head, format, target, bool(measured.recipe), extras.origin)}",
        f"## Measured\n\n{_measured(measured, extras)}",
        f"## Use it\n\n{usage(head, format, name, target, tree)}",
        f"## Which readers take it\n\n{_readers(head, format)}",
        f"## How it was trained\n\n{_recipe(measured, extras.origin)}",
        f"## Licence\n\n{_license(head, target, extras)}",
    ]
    return "\n\n".join(sections) + "\n"


def _title(name):
    return Path(split_name(name)[0]).name


def is_hub_id(name):
    """Whether `name` can be an "owner/name" of the Hub: it has that form and is not a folder here."""
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return name.count("/") == 1 and not Path(name).exists()


def target_name(base_model):
    """The target as a card may name it: a Hub id, a relative path, or the last part of an absolute one."""
    if not base_model:
        return "TARGET"
    # An absolute path belongs to the training machine; a relative one also works for the reader.
    return base_model if is_hub_id(base_model) or not Path(base_model).is_absolute() else Path(base_model).name


def _front_matter(head, name, measured, extras):
    base_model, data = head.config.base_model_name_or_path, str((measured.recipe or {}).get("data", ""))
    results = eval_results(measured.acceptance)
    # Several sets have commas between; without splits and weights.
    names = [data] if os.path.exists(data) else [one.strip().partition(":")[0] for one in data.split(",")]
    inherited = extras.origin.license if extras.origin else {}
    stated = (
        {"license": extras.license}
        if extras.license
        else inherited or {"license": "other", "license_name": "not-stated"}
    )
    fields = ModelCardData(
        model_name=_title(name),
        base_model=base_model if is_hub_id(base_model) else None,
        datasets=[name for name in names if is_hub_id(name)] or None,
        library_name="headstart",
        license=stated["license"],
        license_name=stated.get("license_name"),
        license_link=stated.get("license_link"),
        pipeline_tag="text-generation",
        tags=["headstart", family_of(head).key.replace("_", "-"), "speculative-decoding"],
        metrics=["acceptance_length"] if results else None,
        eval_results=results or None,
    )
    return f"---\n{fields.to_yaml()}\n---"


def _summary(head, format, target, trained, origin):
    done = "trained and exported" if trained else "exported"
    family, config = family_of(head), head.config
    called, verb, shape = rules_of(family).in_card(head)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    rows = "\n".join(f"| {name} | {value} |" for name, value in shape)
    return (
        f"{called} ([arXiv {family.paper}](https://arxiv.org/abs/{family.paper})) that {verb} {head.num_speculative_tokens} tokens "
        f"ahead for the target `{target}`, {done} with Headstart. In Headstart's engine the target checks every drafted token, and "
        f"the output is the one it gives without them.{f' {origin.text}' if origin else ''}\n\n"
        f"{_adapted(head, target)}"
        "| | |\n|---|---|\n"
        f"| target | `{target}`: hidden size {head.target_hidden_size}, vocabulary {config.vocab_size} |\n"
        f"{rows}\n"
        f"| parameters | {num_parameters:,} in {dtype} |\n"
        f"| format | `{format}` |"
    )


def _adapted(head, target):
    """A paragraph on heads trained together with an adapter of their target."""
    if not head.adapter:
        return ""
    return (
        f"**They belong to the adapted target**: they were trained together with a LoRA adapter of `{target}` (Medusa-2), which "
        f"lies in `adapter/` in peft's format (weights `{head.adapter}`). With it the output is the one that the adapted "
        f"target gives without the heads, which is not that of `{target}` itself; without it their drafts are accepted less often."
        "\n\n"
    )


def _measured(measured, extras):
    parts = []
    if measured.step is not None:
        which = "the best that were measured in the run, those" if measured.is_best else "the checkpoint"
        parts.append(f"These heads are {which} of training step {measured.step}; the figures are of that step.")
    if extras.dtype_changed:
        parts.append("The figures were measured before the weights were cast to this export's dtype.")
    if measured.acceptance:
        ranges = [intervals(one["by_request"])[0] if one.get("by_request") else None for one in measured.acceptance]
        parts.append(acceptance_table(measured.acceptance, ranges))
    else:
        parts.append("Acceptance: no measurement was found.")
    parts.append(_benchmark(measured.benchmark) if measured.benchmark else "Speed: no benchmark was found.")
    if measured.tree is not None:
        parts.append(_tree(measured.tree_content))
    parts += [f"![{Path(name).stem}]({PLOTS}/{name})\n\n{CAPTIONS[name]}" for name in extras.plots]
    return "\n\n".join(parts)


def _tree(content):
    """A paragraph on tree.json."""
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


def usage(head, format, name, target, tree):
    """Text of the section "Use it": in Headstart, verification, other engines.

    name: the name that loads the export (a folder, OWNER/NAME or OWNER/NAME@BRANCH); target: its name; tree: "static" or
    "chain".
    """
    parts = [_headstart(head, name, target, tree), _check(name, target)]
    return "\n\n".join(parts + engine_commands(head, format, name, target))


def _python(text):
    """The text as a Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def _headstart(head, name, target, tree):
    depth, adapted = head.num_speculative_tokens, bool(head.adapter)
    argument = f"\n    adapter={_python(name)}," if adapted else ""
    shell, option = shlex.quote(name), f" --adapter {shlex.quote(name)}" if adapted else ""
    return f'''```python
from headstart import LLM, SamplingParams

llm = LLM(
    model={_python(target)},{argument}
    speculative_config={{"model": {_python(name)}, "num_speculative_tokens": {depth}, "tree": "{tree}"}},
)
[result] = llm.generate(["{PROMPT}"], SamplingParams(temperature=0.0, max_tokens=96))
print(result.outputs[0].text, result.outputs[0].spec_decode_metrics)
```

The heads alone, as a module: `from headstart import load_head; head = load_head({_python(name)})`. From a terminal:

```sh
headstart generate --model {shlex.quote(target)}{option} --head {shell} --tree {tree} --compare "{PROMPT}"
```'''


def _check(name, target):
    return f"""Whether the files are what was written, and do what this card says:

```sh
heads.export verify {shlex.quote(name)} --model {shlex.quote(target)}
```"""


def _readers(head, format):
    lines = ["| reader | takes these files |", "|---|---|"]
    lines += [f"| {reader} | {takes} |" for reader, takes in readers_table(head, format)]
    return "\n".join(lines)


def _recipe(measured, origin):
    if not measured.recipe:
        return "No recipe was found" + (f"; {origin.card}, {origin.link}, may have it." if origin else ".")
    shown = yaml.safe_dump(measured.recipe, sort_keys=False, allow_unicode=True)
    start, began = str(measured.recipe.get("start_from") or ""), ""
    if is_hub_id(start.partition("@")[0]):
        began = f"The training went on with the head `{start}`, whose licence may have a say in this one.\n\n"
    return f"{began}The run's resolved configuration:\n\n```yaml\n{shown}```"


def _license(head, target, extras):
    """Paragraph on licences: the head's is named by its exporter or publisher, the target's by the target's makers."""
    license, origin = extras.license, extras.origin
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
    elif rules_of(family_of(head)).FROM_LM_HEAD and not head.uses_target_lm_head:
        parts.append(
            "No tensor here is a copy of the target's, but the output matrices may have been started from its lm_head, and "
            "the target's licence may have a say in what is made from it."
        )
    else:
        parts.append("No tensor here is a copy of the target's; they were trained on what it computes.")
    if extras.tokenizer:
        parts.append("The tokenizer files are the target's, copied, for readers that look for them here.")
    return " ".join(parts)


def with_tracked_run(card, tracked):
    """A model card with `tracked` under "wandb" in its front matter; None leaves it as it is."""
    if tracked is None:
        return card
    front, rest = card.split("\n---\n", 1)
    return f"{front}\n{yaml.safe_dump({'wandb': tracked}, sort_keys=False)}---\n{rest}"


def write_plots(output, measured, source=None):
    """Draw the Measurements into output/plots. A drawing of an earlier export in `source` is kept if there is no newer one.

    Returns the names of the files, in the order of CAPTIONS.
    """
    drawings, written = _drawings(measured), []
    for name in CAPTIONS:
        earlier = None if source is None else Path(source, PLOTS, name)
        text = as_file(drawings[name])
        if not text and earlier is not None and earlier.is_file():
            text = earlier.read_text(encoding="utf-8")
        if text:
            Path(output, PLOTS).mkdir(exist_ok=True)
            Path(output, PLOTS, name).write_text(text, encoding="utf-8")
            written.append(name)
    return written


def _drawings(measured):
    """{file: an <svg>, or "" if there are no figures}"""
    by_temperature = [
        (f"temperature {one['temperature']:g}", list(enumerate(one["per_position"], start=1)))
        for one in measured.acceptance
    ]
    tree = measured.tree_content
    rates = tree.get("rates") or measured.rates
    lines = [line for line in measured.training if line.get("kind") == "train"]
    count = 0
    while any(f"head{count}_loss" in line for line in lines):
        count += 1
    losses = [
        (f"head {i}", [(line["step"], line[f"head{i}_loss"]) for line in lines if f"head{i}_loss" in line])
        for i in range(count)
    ] or [("", [(line["step"], line["loss"]) for line in lines if "loss" in line])]
    acceptance = [line for line in measured.training if line.get("kind") == "acceptance"]
    lengths = [(line["step"], line["acceptance_length"]) for line in acceptance]
    return {
        "acceptance.svg": line_chart(
            by_temperature,
            title="Acceptance per drafted token",
            x_label="drafted token",
            y_label="share of steps",
            start=0,
            y_max=1,
        ),
        "rates.svg": heat_map(rates, title="Acceptance per depth and rank") if rates and any(rates) else "",
        "tree.svg": tree_drawing(tree["parents"], tree["ranks"], rates, title="Draft tree")
        if "parents" in tree
        else "",
        "loss.svg": line_chart(losses, title="Training loss", y_label="loss"),
        "training.svg": line_chart(
            [("", lengths)] if len(lengths) > 1 else [],
            title="Acceptance length",
            y_label="tokens per step",
            start=1,
            breaks=breaks(acceptance),
        ),
    }
