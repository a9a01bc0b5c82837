"""The model card of the embedded target, written from the figures of a run of assets/make/make_stdlib_coder.py."""

from pathlib import Path

from headstart.train.data.stdlib_pairs import Source

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: [en, code]
---

# stdlib-coder: a small target for speculative decoding

A Llama of {parameters:.1f} M parameters ({layers} layers, width {width}, vocabulary {vocabulary}) that writes short Python
functions from a docstring. It exists so that speculator heads can be trained, tested and timed against a real language
model in minutes on any machine. It is not a coding assistant.

Request format (the chat template does this): `<|user|>Write the Python function `name`: docstring<|assistant|>`; the
answer ends with `<|end|>`. A function without a docstring is asked for as ``Write the Python function `name`.`` or
``Write the Python method `Class.name`.``

## What it cannot do
It has seen English only in docstrings, and no conversation: no dialogue, no explanations, no other language. A system
message is rendered like a user's. Longer functions drift, names are invented, and the code often does not do what the
docstring says: of the samples below, judge for yourself. Use nothing it writes without reading it.

## Data
(docstring -> function) pairs and named functions from Python source installed on one machine, all under permissive
licences according to the packages' own metadata; copyleft, unclear and vendored code was skipped. {num_pairs}
functions and classes, {num_tokens:.0f} M tokens, each body once. Modules are split by a hash of their name: about 4 %
never entered the tokenizer or the training, nor did copies of their functions in other modules.

`heldout.jsonl` holds {num_heldout} conversations from held-out modules of the standard library (Python {python}, PSF-2.0).

## Recipe
`python assets/make/make_stdlib_coder.py{arguments}` on one {device}: {seconds} s, {num_steps} steps, {passes:.1f} passes over the
rows, {speed:.2f} M tokens/s, last training loss {loss:.2f} nats a token. Every setting is in `recipe.json`.

## Figures
On functions of held-out modules that the training never saw, with the bf16 weights shipped here. Bits per byte do not
depend on the tokenizer; "whole" counts the request too.

| held out from | functions | run | answer, bits/byte | whole, bits/byte | whole, nats/token |
|---|---|---|---|---|---|
{figures}
{compared}
## Samples
Greedy, on held-out requests, not chosen by hand.

{samples}
## Sources
| package | version | licence |
|---|---|---|
{sources}
"""


def write_card(
    folder: Path,
    report: dict,
    sources: list[Source],
    samples: list[tuple[str, str]],
    num_heldout: int,
    arguments: str,
    compared: dict | None = None,
) -> None:
    """Write README.md. report: {"figures", "training", "recipe"} of the run; compared: the same of an earlier run."""
    training, recipe = report["training"], report["recipe"]
    rows = []
    for group in report["figures"]:
        rows.append(_figures_row(group, "this model", report["figures"][group]))
        if compared and group in compared["figures"]:
            rows.append(_figures_row(group, "earlier recipe", compared["figures"][group]))
    note = ""
    if compared:
        differing = {name: value for name, value in compared["recipe"].items() if value != recipe.get(name)}
        settings = ", ".join(f"{name} {value}" for name, value in differing.items())
        note = (
            f"\nThe earlier recipe, on the same split: {settings}; {compared['training']['num_pairs']} functions, "
            f"{compared['training']['passes']:.1f} passes, {compared['training']['seconds']} s, last training loss "
            f"{compared['training']['training_loss']:.2f}.\n"
        )
    card = _CARD.format(
        parameters=training["num_parameters"] / 1e6,
        layers=recipe["num_layers"],
        width=recipe["hidden_size"],
        vocabulary=recipe["vocab_size"],
        num_pairs=training["num_pairs"],
        num_tokens=training["num_tokens"] / 1e6,
        num_heldout=num_heldout,
        python=sources[0].version,
        arguments=arguments,
        device=training["device"],
        seconds=training["seconds"],
        num_steps=training["num_steps"],
        passes=training["passes"],
        speed=training["tokens_per_second"] / 1e6,
        loss=training["training_loss"],
        figures="\n".join(rows),
        compared=note,
        samples="\n".join(f"> {prompt}\n\n```python\n{answer}\n```\n" for prompt, answer in samples),
        sources="\n".join(f"| {source.package} | {source.version} | {source.licence} |" for source in sources),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _figures_row(group: str, run: str, figures: dict) -> str:
    return (
        f"| {group} | {figures['num_functions']} | {run} | {figures['answer_bits_per_byte']:.3f} | "
        f"{figures['whole_bits_per_byte']:.3f} | {figures['whole_nats_per_token']:.3f} |"
    )
