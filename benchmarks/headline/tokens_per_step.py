"""The fourth stage: tokens per step of everything that drafts, on held-out prompts, and whether a token is not plain decoding's.

Every source drafts a chain, and where it can a static tree from rates measured on other held-out prompts, and a tree grown in every
step. Each is measured at temperatures 0 and 1, with many requests at once, and the first prompts alone. The verifier is `strict`,
so the tokens must be those of plain decoding with the same seeds, one by one. Outputs end where the target ends them. No speed is
measured here: a target this small is bound by launches.
"""

import itertools
import time

from ...evaluation.acceptance import acceptance_interval, measure_acceptance
from ...evaluation.compare import hardware_name
from ...evaluation.timing import release
from ...heads.checkpoint import load_head
from ...inference.llm import LLM
from ...inference.prompt_files import read_prompts, render_prompt
from ...inference.sampling_params import SamplingParams
from ...inference.speculation.options import SpeculativeOptions
from ...inference.speculation.proposers import find_proposer
from ...inference.speculation.tree import GrowingTree, build_static_tree, save_tree
from .corpus import SUBJECTS
from .families import DRAFT_MODEL, NGRAM

TEMPERATURES = (0.0, 1.0)
DYNAMIC_WIDTH = 8


class Meter:
    """The target, the prompts, and the tokens of plain decoding, which all sources are compared with."""

    def __init__(self, settings, work, device):
        self.settings, self.work, self.device = settings, work, device
        self.base = LLM(
            str(work.target), device=device.type, max_num_seqs=1, num_gpu_blocks_override=32, enforce_eager=True
        )
        self.for_rates, self.measured = {}, {}
        for subject in SUBJECTS:
            prompts = [render_prompt(self.base.tokenizer, prompt) for prompt in read_prompts(work.heldout(subject))]
            self.for_rates[subject] = prompts[: settings.rate_prompts]
            self.measured[subject] = prompts[settings.rate_prompts :][: settings.prompts]
        self.plain, self.plain_differs = {}, 0
        llm = self.engine(None)
        for subject, temperature in self.places():
            together, alone = self.run(llm, subject, temperature)
            self.plain[subject, temperature] = tokens = [one.outputs[0].token_ids for one in together]
            self.plain_differs += count_other(alone, tokens)

    def places(self):
        """Pairs of a subject and a temperature."""
        return [(subject, temperature) for temperature in TEMPERATURES for subject in SUBJECTS]

    def engine(self, speculative):
        release(self.device)
        return LLM(self.base, max_num_seqs=self.settings.batch, speculative_config=speculative)

    def params(self, temperature, count):
        """One SamplingParams per prompt; its seed is the prompt's number, so plain and speculative runs draw the same noise."""
        return [
            SamplingParams(
                temperature=temperature, max_tokens=self.settings.max_tokens, seed=1000 * self.settings.seed + i
            )
            for i in range(count)
        ]

    def run(self, llm, subject, temperature):
        """(outputs of all prompts, many at once; outputs of the first ones, alone)."""
        prompts = self.measured[subject]
        params = self.params(temperature, len(prompts))
        together = llm.generate(prompts, params, use_tqdm=False)
        count = self.settings.alone
        alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(prompts[:count], params)]
        return together, alone

    def measure(self, source):
        """Measure one source, print and keep its rows, and its static trees for the second table."""
        began = time.perf_counter()
        options, depth = self.speculation(source)
        trees = {}
        chain = self.engine(options | {"tree": "chain", "num_speculative_tokens": depth})
        for temperature in TEMPERATURES if source.trees else ():
            params = self.params(temperature, len(SUBJECTS) * self.settings.rate_prompts)
            found = measure_acceptance(chain, [*itertools.chain.from_iterable(self.for_rates.values())], params)
            place = self.work.folder / "trees" / f"{source.slug}-{temperature:g}.json"
            place.parent.mkdir(exist_ok=True)
            tree = build_static_tree(found["rates"], self.settings.nodes)
            if tree.num_nodes < 2:
                print(f"{source.name}, T {temperature:g}: no draft was ever right, so there is no tree", flush=True)
                continue
            save_tree(tree, place, found["rates"])
            trees[temperature] = place
        rows = self.rows(source, chain, TEMPERATURES, "chain")
        del chain
        for temperature, place in trees.items():
            rows += self.rows(source, self.engine(options | {"tree": str(place)}), (temperature,), "static tree")
        if source.trees:
            most = 1 + DYNAMIC_WIDTH + (depth - 1) * DYNAMIC_WIDTH**2
            grown = GrowingTree(depth, DYNAMIC_WIDTH, min(self.settings.nodes, most))
            place = self.work.folder / "trees" / f"{source.slug}-grown.json"
            save_tree(grown, place)
            rows += self.rows(source, self.engine(options | {"tree": str(place)}), TEMPERATURES, "grown tree")
        mark_best(rows)
        seconds = time.perf_counter() - began
        for row in rows:
            print(describe(row), flush=True)
        print(f"{source.name}: {seconds:.0f} s", flush=True)
        texts = {f"{temperature:g}": place.read_text() for temperature, place in trees.items()}
        self.work.keep(
            "acceptance",
            source.slug,
            {
                "name": source.name,
                "rows": rows,
                "trees": texts,
                "depth": depth,
                "plain_other_outputs": self.plain_differs,
            }
            | {"hardware": hardware_name(self.device)},
        )

    def speculation(self, source):
        """(speculative_config without tree, depth) of a source."""
        depth = self.settings.depth
        if source == NGRAM:
            options = {"method": "ngram"}
        elif source == DRAFT_MODEL:
            self.work.needs("heads", source.slug)
            options = {"model": str(self.work.draft), "method": "draft_model"}
        else:
            self.work.needs("heads", source.slug)
            head = load_head(self.work.heads / source.slug)
            options = {"model": head.to(self.base.device, self.base.dtype).eval()}
        proposer = find_proposer(SpeculativeOptions(**options), self.base.config)
        return options, min(depth, proposer.max_depth)

    def rows(self, source, llm, temperatures, kind):
        """Rows of one way of drafting: for each subject and temperature, many at once and alone."""
        found = []
        for subject, temperature in self.places():
            if temperature not in temperatures:
                continue
            together, alone = self.run(llm, subject, temperature)
            expected = self.plain[subject, temperature]
            for batch, outputs in ((self.settings.batch, together), (1, alone)):
                row = {"table": "acceptance", "source": source.name, "draft": kind, "nodes": llm.tree.num_nodes}
                row |= {"depth": llm.tree.max_depth, "subject": subject, "temperature": temperature, "batch": batch}
                row |= acceptance_interval(outputs)
                row |= {"prompts": len(outputs), "tokens": sum(len(one.outputs[0].token_ids) for one in outputs)}
                row |= {"other_outputs": count_other(outputs, expected), "best_tree": False}
                row |= by_prompt(outputs)
                found.append(row)
        return found


def count_other(outputs, expected):
    """How many outputs are not the expected tokens, of as many as there are outputs."""
    return sum(list(one.outputs[0].token_ids) != list(tokens) for one, tokens in zip(outputs, expected))


def by_prompt(outputs):
    """Steps of each prompt and tokens that they made, as texts: lists would take a line a number in the results."""
    metrics = [one.outputs[0].spec_decode_metrics for one in outputs]
    made = [round(one.num_steps * one.acceptance_length) for one in metrics]
    return {
        "steps_by_prompt": " ".join(str(one.num_steps) for one in metrics),
        "tokens_by_prompt": " ".join(map(str, made)),
    }


def mark_best(rows):
    """Mark the better tree of each subject, temperature and batch."""
    places = {(row["subject"], row["temperature"], row["batch"]) for row in rows}
    for place in places:
        trees = [row for row in rows if place == (row["subject"], row["temperature"], row["batch"])]
        trees = [row for row in trees if row["draft"] != "chain"]
        if trees:
            max(trees, key=lambda row: row["acceptance_length"])["best_tree"] = True


def describe(row):
    """A row as a line."""
    same = "all tokens equal" if not row["other_outputs"] else f"{row['other_outputs']} OUTPUTS DIFFER"
    return (
        f"{row['source']:16} {row['draft']:11} of {row['nodes']:2}  T {row['temperature']:g}  batch {row['batch']:2}  "
        f"{row['subject']:11}  {row['acceptance_length']:.3f} tokens a step, 95 % {row['low']:.3f} to {row['high']:.3f}, "
        f"{row['steps']} steps, {same}" + (", the better tree" * row["best_tree"])
    )
