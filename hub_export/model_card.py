"""The model card (README.md) of an export: what the head is, what was measured on it, how to use it, who reads it.

Every figure comes from a file beside the source (hub_export/measurements.py); a figure that is not there is said to be
absent. Paths of this machine are not written.
"""

from pathlib import Path

import yaml
from huggingface_hub.utils import validate_repo_id

from ..heads.formats import family_of
from ..inference.adapter import adapter_of
from .readers import VLLM_METHODS, readers_table

# family -> (tag, what the card calls such a head, arXiv number of its paper)
PAPERS = {
    "Medusa": ("medusa", "Medusa heads", "2401.10774"),
    "MLP speculator": ("mlp-speculator", "MLP speculator", "2404.19124"),
    "EAGLE": ("eagle", "EAGLE head", "2401.15077"),
    "EAGLE-3": ("eagle3", "EAGLE-3 head", "2503.01840"),
}


def model_card(head, format, name, measured, license=None, dtype_changed=False):
    """The text of README.md.

    name: how the export is called to load it (a Hub id or a folder's name); measured: Measurements of its source;
    dtype_changed: the export holds another dtype than the source the figures were measured with.
    """
    target = target_name(head.config.base_model_name_or_path)
    sections = [
        _front_matter(head, license),
        f"# {Path(name).name}\n\n{_summary(head, format, target)}",
        f"## Measured\n\n{_measured(measured, dtype_changed)}",
        f"## Use it\n\n{_usage(head, format, name, target, measured)}",
        f"## Which readers take it\n\n{_readers(head, format)}",
        f"## How it was trained\n\n{_recipe(measured)}",
    ]
    return "\n\n".join(sections) + "\n"


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


def _front_matter(head, license):
    base_model = head.config.base_model_name_or_path
    fields = {"base_model": base_model} if is_hub_id(base_model) else {}
    fields |= {
        "library_name": "headstart",
        "license": license or "other",
        "pipeline_tag": "text-generation",
        "tags": ["headstart", PAPERS[family_of(head)][0], "speculative-decoding"],
    }
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _summary(head, format, target):
    config, depth = head.config, head.num_speculative_tokens
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    _, kind, paper = PAPERS[family_of(head)]
    count, verb = (
        (f"{depth} ", "draft up to") if family_of(head) == "Medusa" else ("An " if kind[0] in "EM" else "A ", "drafts")
    )
    rows = "\n".join(f"| {name} | {value} |" for name, value in _shape(head))
    hidden_size = config.target_hidden_size if family_of(head) == "EAGLE-3" else config.hidden_size
    return (
        f"{count}{kind} ([arXiv {paper}](https://arxiv.org/abs/{paper})) that {verb} {depth} tokens ahead for the target "
        f"`{target}`, trained and exported with Headstart. In Headstart's engine the target checks every drafted token, and the "
        "output is the one it gives without them.\n\n"
        f"{_adapted(head, target)}"
        "| | |\n|---|---|\n"
        f"| target | `{target}`: hidden size {hidden_size}, vocabulary {config.vocab_size} |\n"
        f"{rows}\n"
        f"| parameters | {num_parameters:,} in {dtype} |\n"
        f"| format | `{format}` |"
    )


def _adapted(head, target):
    """What there is to say of heads that were trained together with an adapter of their target."""
    if not adapter_of(head):
        return ""
    return (
        f"**They belong to the adapted target**: they were trained together with a LoRA adapter of `{target}` (Medusa-2), which "
        f"lies in `adapter/` in peft's format (weights `{adapter_of(head)}`). With it the output is the one that the adapted "
        f"target gives without the heads, which is not that of `{target}` itself; without it their drafts are accepted less often."
        "\n\n"
    )


def _shape(head):
    """(name, value) of what a family's heads differ in."""
    config, family = head.config, family_of(head)
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


def _measured(measured, dtype_changed):
    parts = []
    if measured.step is not None:
        parts.append(f"These heads are the checkpoint of training step {measured.step}; the figures are of that step.")
    if dtype_changed:
        parts.append("The figures were measured before the weights were cast to this export's dtype.")
    parts.append(_acceptance(measured.acceptance) if measured.acceptance else "Acceptance: no measurement came along.")
    parts.append(_benchmark(measured.benchmark) if measured.benchmark else "Speed: no benchmark came along.")
    return "\n\n".join(parts)


def _acceptance(acceptance):
    by_engine = acceptance.get("source", "engine") == "engine"
    how = "by Headstart's engine, drafting a chain" if by_engine else "teacher-forced, not by the engine"
    steps = f" over {acceptance['num_steps']:,} steps" if "num_steps" in acceptance else ""
    lines = [f"Acceptance, measured {how}{steps} (acceptance length = 1 + accepted / steps):", "", "| | |", "|---|---|"]
    lines.append(f"| acceptance length | {_figure(acceptance.get('acceptance_length'))} |")
    for position, rate in enumerate(acceptance.get("per_position", ()), start=1):
        lines.append(f"| accepted at position {position} | {_figure(rate)} |")
    return "\n".join(lines)


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
        f"`{_without_folders(benchmark.get('command', 'headstart bench'))}`:",
        "",
        f"| {' | '.join(['heads', *COLUMNS.values()])} |",
        f"|{'---|' * (len(COLUMNS) + 1)}",
    ]
    for row in benchmark.get("rows", ()):
        cells = [_figure(row.get(key)) for key in COLUMNS]
        path = Path(str(row.get("head", "-")))
        lines.append(f"| {' | '.join([path.parent.name if path.name == 'head' else path.name, *cells])} |")
    return "\n".join(lines)


def _without_folders(command):
    """A command line whose absolute paths keep only their last part."""
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in str(command).split())


def _figure(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "not measured" if value is None else str(value)


def _usage(head, format, name, target, measured):
    tree = "static" if measured.tree is not None else "chain"
    depth = head.num_speculative_tokens
    adapted = bool(_adapted(head, target))
    argument, option = (f'\n    adapter="{name}",', f" --adapter {name}") if adapted else ("", "")
    text = f'''```python
from headstart import LLM, SamplingParams

llm = LLM(
    model="{target}",{argument}
    speculative_config={{"model": "{name}", "num_speculative_tokens": {depth}, "tree": "{tree}"}},
)
[result] = llm.generate(["Write a function that reads a file."], SamplingParams(temperature=0.0, max_tokens=96))
print(result.outputs[0].text, result.outputs[0].spec_decode_metrics)
```

The heads alone, as a module: `from headstart import load_head; head = load_head("{name}")`. From a terminal:

```sh
headstart generate --model {target}{option} --head {name} --tree {tree} --compare "Write a function that reads a file."
```'''
    if format in VLLM_METHODS:
        method, versions = VLLM_METHODS[format]
        of_merged = (
            f", where TARGET is `{target}` with the adapter merged (`heads.export --merge-adapter`)" if adapted else ""
        )
        target = "TARGET" if adapted else target
        text += f"""

In {versions}{of_merged}:

```sh
vllm serve {target} --speculative-config '{{"method": "{method}", "model": "{name}", "num_speculative_tokens": {depth}}}'
```"""
    return text


def _readers(head, format):
    lines = ["| reader | takes these files |", "|---|---|"]
    lines += [f"| {reader} | {takes} |" for reader, takes in readers_table(head, format)]
    return "\n".join(lines)


def _recipe(measured):
    if not measured.recipe:
        return "No recipe came along."
    # Paths of the machine it was trained on tell a reader nothing.
    shown = {key: value for key, value in measured.recipe.items() if not str(value).startswith(("/", "~", "\\"))}
    return (
        f"The run's resolved configuration:\n\n```yaml\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)}```"
    )
