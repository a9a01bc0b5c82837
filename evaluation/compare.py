"""Compare speculation with plain decoding, and with transformers' generate, in one run: equal tokens, tokens per step, speed-up.

Every prompt is answered by each way of drafting in turn before the next prompt comes, so a drift of the machine's speed affects all
of them alike. Times are of `generate` as a whole, prefill included.
"""

import json
import time
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

from ..heads.storage.atomic_write import write_json
from ..inference.llm import LLM
from ..inference.sampling_params import SamplingParams
from ..inference.speculation.tree import MAX_NODES, build_static_tree, load_tree, save_tree
from ..kernels.attention.tree_attention import PAGE
from ..kernels.numerics import device_name


def hardware_name(device):
    """The name of a device's processor or GPU; for a processor also torch's number of threads."""
    device = torch.device(device)
    if device.type == "cuda":
        return device_name(device)
    threads = torch.get_num_threads()
    return f"{device_name(device)}, {threads} thread{'s' if threads > 1 else ''}"


# Several engines share the device, so each gets a cache for only one request of 4k tokens.
PAGES = (4096 + 2 * MAX_NODES) // PAGE


class Contestant:
    """One way of decoding: an LLM, and the time and tokens it took so far."""

    def __init__(self, head, draft, llm):
        self.head, self.draft, self.llm = head, draft, llm
        self.seconds, self.tokens, self.outputs = 0.0, 0, []

    def answer(self, prompt, params):
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], params)
        self.seconds += time.perf_counter() - start
        self.tokens += len(output.outputs[0].token_ids)
        self.outputs.append(output.outputs[0].token_ids)


LOOKED_UP = 5  # tokens that transformers' prompt lookup drafts at most


class Library:
    """transformers' generate, plain or assisted by prompt lookup, in the place of a Contestant."""

    def __init__(self, draft, module, eos_token_ids, **options):
        self.head, self.draft, self.module, self.options = "transformers", draft, module, options
        self.eos_token_ids = sorted(eos_token_ids)
        self.seconds, self.tokens, self.outputs = 0.0, 0, []

    def generate(self, prompt, params):
        """Token ids of one output; at a temperature they are drawn from the same distribution, with the library's own noise."""
        ids = torch.tensor([prompt], device=self.module.device)
        sampling = {"do_sample": False}
        if params.temperature:
            torch.manual_seed(params.seed)
            sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            found = self.module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                eos_token_id=self.eos_token_ids or None,
                pad_token_id=self.eos_token_ids[0] if self.eos_token_ids else 0,
                **sampling,
                **self.options,
            )
        return found[0, len(prompt) :].tolist()

    def answer(self, prompt, params):
        start = time.perf_counter()
        tokens = self.generate(prompt, params)
        self.seconds += time.perf_counter() - start
        self.tokens += len(tokens)
        self.outputs.append(tokens)

    def row(self, plain, temperature):
        rate = self.tokens / self.seconds
        return {
            "head": self.head,
            "draft": self.draft,
            "temperature": temperature,
            "tokens_per_second": round(rate, 2),
            "speedup": round(rate / (plain.tokens / plain.seconds), 4),
            "num_identical": None if temperature else sum(map(list.__eq__, self.outputs, map(list, plain.outputs))),
            "num_outputs": len(self.outputs),
            "num_tokens": self.tokens,
        }


def compare(target, heads, prompts, temperatures=(0.0, 0.8), max_tokens=96, seed=0, use_tqdm=True, module=None):
    """Measure every head with every tree against plain decoding at batch 1.

    target: an LLM, whose weights and tokenizer all engines share; heads: list of (name, head, [(label, tree file)]);
    prompts: as LLM.generate takes them; each request is seeded, so that plain and speculative runs draw the same noise.
    Returns rows {"head", "draft", "num_nodes", "temperature", "acceptance_length", "tokens_per_second", "speedup", "identical",
    "num_tokens"}; the first of each temperature is plain decoding. module: None, or the target as a transformers model, whose own
    generate is measured, too. Its rows are the second result: {"head", "draft", "temperature", "tokens_per_second", "speedup",
    "num_identical", "num_outputs", "num_tokens"}. Its sums round otherwise than the engine's, so a near-tie may fall elsewhere.
    """

    def make_llm(speculative=None):
        return LLM(target, max_num_seqs=1, num_gpu_blocks_override=PAGES, speculative_config=speculative)

    def contestants():
        yield Contestant("none", "none", make_llm())
        for name, head, trees in heads:
            for label, tree in trees:
                yield Contestant(name, label, make_llm({"model": head, "tree": tree}))

    def libraries():
        if module is not None:
            yield Library("generate", module, target.eos_token_ids)
            yield Library(
                f"prompt lookup of {LOOKED_UP}", module, target.eos_token_ids, prompt_lookup_num_tokens=LOOKED_UP
            )

    rows, library_rows = [], []
    ids = [target.session.check(prompt).token_ids for prompt in prompts]
    total = len(temperatures) * len(prompts) * (1 + 2 * (module is not None) + sum(len(trees) for _, _, trees in heads))
    with tqdm(total=total, desc="comparing", unit="output", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for temperature in temperatures:
            runs = None  # the engines of the previous temperature free their memory first
            runs = list(contestants())
            for run in runs:  # the first calls include allocations and thread start-up
                run.llm.generate([prompts[0]], SamplingParams(temperature=temperature, max_tokens=8, seed=seed))
                run.before = run.llm.get_stats()
            others = list(libraries())
            for run in others:
                run.generate(ids[0], SamplingParams(temperature=temperature, max_tokens=8, seed=seed))
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + number)
                for run in runs:
                    run.answer(prompt, params)
                    bar.update()
                for run in others:
                    run.answer(ids[number], params)
                    bar.update()
            rows += [_row(run, runs[0], temperature) for run in runs]
            library_rows += [run.row(runs[0], temperature) for run in others]
    return rows, library_rows


def _row(run, plain, temperature):
    after = run.llm.get_stats()
    steps = after["num_spec_steps"] - run.before["num_spec_steps"]
    accepted = after["num_accepted_tokens"] - run.before["num_accepted_tokens"]
    rate = run.tokens / run.seconds
    return {
        "head": run.head,
        "draft": run.draft,
        "num_nodes": run.llm.tree.num_nodes,
        "temperature": temperature,
        "acceptance_length": round(1 + accepted / steps, 4) if steps else 1.0,
        "tokens_per_second": round(rate, 2),
        "speedup": round(rate / (plain.tokens / plain.seconds), 4),
        "identical": run.outputs == plain.outputs,
        "num_tokens": run.tokens,
    }


def candidate_trees(num_heads, tree_file, sizes, folder):
    """The drafts to compare for a head: a chain, its static tree, and the best trees of other sizes.

    tree_file: the head's tree.json, with the rates that trees of `sizes` nodes are built from (and written into `folder`). Raises
    ValueError if it holds no rates and sizes are given.
    """
    drafts = [(f"chain of {num_heads}", "chain"), (f"tree of {load_tree(tree_file).num_nodes}", str(tree_file))]
    rates = json.loads(Path(tree_file).read_text()).get("rates")
    if sizes and not rates:
        raise ValueError(
            f"{tree_file} holds no rates to build trees of other sizes from: make it with `headstart tree`"
        )
    for size in sizes:
        tree = build_static_tree(rates, size)
        path = Path(folder) / f"{tree.num_nodes}.json"
        save_tree(tree, path, rates)
        drafts.append((f"tree of {tree.num_nodes}", str(path)))
    return list(dict(drafts).items())


def format_table(rows, library_rows=()):
    """The rows as a text table, those of transformers before the others of their temperature."""
    header = ("temperature", "head", "draft", "same tokens", "tokens/step", "tokens/s", "speed-up")
    lines = []
    for row in rows:
        plain = row["draft"] == "none"
        if plain:
            same = [other for other in library_rows if other["temperature"] == row["temperature"]]
            lines += [_library_line(other) for other in same]
        lines.append(
            (
                f"{row['temperature']:g}",
                row["head"],
                "plain decoding" if plain else row["draft"],
                "reference" if plain else ("yes" if row["identical"] else "NO"),
                f"{row['acceptance_length']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']:.2f}x",
            )
        )
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = []
    for number, line in enumerate([header, *lines]):
        if number == 1:
            text.append("  ".join("-" * width for width in widths))
        elif number > 1 and line[0] != lines[number - 2][0]:
            text.append("")
        text.append(
            "  ".join(cell.ljust(w) if i < 4 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        )
    return "\n".join(text)


def _library_line(row):
    identical, outputs = row["num_identical"], row["num_outputs"]
    same = "own noise" if identical is None else ("yes" if identical == outputs else f"{identical} of {outputs}")
    figures = f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x"
    return (f"{row['temperature']:g}", row["head"], row["draft"], same, "", *figures)


def save_comparison(rows, path, device, dtype, command, library_rows=()):
    """Write rows with hardware, date and command as JSON (aside, then renamed)."""
    content = {
        "hardware": hardware_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "date": date.today().isoformat(),
        "command": command,
        "rows": rows,
    }
    if library_rows:
        content["transformers"] = library_rows
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content, indent=1, ensure_ascii=True)
    return content
