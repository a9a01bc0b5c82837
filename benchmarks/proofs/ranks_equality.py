"""Prove that ranks give the bits of one, with and without speculation: random weights of a shape, one rank and then several.

    python benchmarks/proofs/ranks_equality.py --shape llama-3-8b                     two ranks, on two GPUs
    python benchmarks/proofs/ranks_equality.py --shape llama-3-8b --ranks 4 --invariant 4
    python benchmarks/proofs/ranks_equality.py --shape llama-3-70b --ranks 4 --reference 4 --draft plain --draft eagle3

One rank, or --reference of them, answers all requests plainly. Then the ranks do, plainly and with every way of drafting: heads of
Medusa (a tree), EAGLE-3 (a dynamic tree) and an MLP speculator (a chain; whole on each rank, draft_tensor_parallel_size 1), which
are random and hardly ever right; the target itself as the draft model, nearly always right; n-grams. A third of the requests are
greedy, a third drawn at temperature 0.9, and in a third each asks for something different, as in equality.py, and for
log-probabilities. They are answered in batches, a few again one by one. At least --tokens tokens come from the ranks. Exits with 1
if a token or a log-probability differs; the JSON then says of each such request, by its number, where that began.

Without --invariant one rank and two are alike where products are cut alike: see docs/engine.md, Several ranks.
"""

import argparse
import random
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

import torch

from headstart.benchmarks.proofs import shape_equality
from headstart.benchmarks.proofs.equality import MIXED, TREES
from headstart.benchmarks.proofs.shape_equality import answer_shuffled
from headstart.benchmarks.random_heads import save_random_head
from headstart.benchmarks.shape import check_fits, config_of_shape, llm_on_ranks
from headstart.evaluation.results import Report, command_line, plain
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.tree import save_tree

GROUPS = {"greedy": [{"temperature": 0.0}], "temperature 0.9": [{}], "mixed": [one | {"logprobs": 2} for one in MIXED]}
HEADS = ("medusa", "eagle3", "mlp speculator")
WAYS = ("plain", *HEADS, "draft model", "ngram")
ALONE = 2  # requests of each group that are answered one by one, too
COLUMNS = {"ranks": ("ranks", 5, plain)} | shape_equality.COLUMNS


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="of the target: a name, or a folder with a config.json")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument(
        "--reference",
        type=int,
        default=1,
        help="number of ranks that answer first (default 1); for a model that no card holds, that of --ranks",
    )
    parser.add_argument("--invariant", type=int, help="tensor_parallel_invariant of one rank and of several")
    parser.add_argument("--draft", action="append", choices=WAYS, help="may be given again (default: all)")
    parser.add_argument("--depth", type=int, default=4, help="depth of the drafts (default 4)")
    parser.add_argument("--tokens", type=int, default=200_000, help="least tokens of the ranks (default 200000)")
    parser.add_argument("--context", type=int, default=200, help="tokens of a prompt, within a tenth (default 200)")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens per request (default 256)")
    parser.add_argument("--batch", type=int, default=64, help="requests at once (default 64)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.reference == 1:
        check_fits(options.shape, device, getattr(torch, options.dtype))
    command = command_line("benchmarks/proofs/ranks_equality.py", arguments)
    report = Report("ranks-equality", COLUMNS, device, command, vars(options), options.output)
    with tempfile.TemporaryDirectory(prefix="headstart-heads-") as folder:
        Proof(options, device, report, Path(folder)).run()
    differing = sum(row["differing"] for row in report.rows)
    tokens = sum(row["tokens"] for row in report.rows[1:])
    report.state(
        f"{differing} requests differ over {tokens} tokens of {options.ranks} ranks",
        ranks_tokens=tokens,
        differing_requests=differing,
    )
    report.finish()
    if tokens < options.tokens:
        raise RuntimeError(f"only {tokens} tokens were compared, not {options.tokens}")
    return 1 if differing else 0


def first_differences(found, expected):
    """Places of the first token and of the first log-probability that differ; None: none does.  each (tokens, log-probabilities)"""
    pairs = [zip_longest(one or (), other or ()) for one, other in zip(found, expected)]
    return [next((place for place, (one, other) in enumerate(pair) if one != other), None) for pair in pairs]


class Proof:
    """The requests, and what the reference answers.  folder: where random heads are written, for every rank to read"""

    def __init__(self, options, device, report, folder):
        self.options, self.device, self.report, self.folder = options, device, report, folder
        self.config = config_of_shape(options.shape)
        self.ways = options.draft or WAYS
        per_group = -(-options.tokens // (options.max_tokens * len(GROUPS) * len(self.ways)))
        chosen, tenth = random.Random(1), options.context // 10
        self.prompts, self.params, self.alone = [], [], []
        for group in GROUPS.values():
            self.alone += range(len(self.prompts), len(self.prompts) + ALONE)
            for i in range(max(per_group, ALONE)):
                length = options.context + chosen.randint(-tenth, tenth)
                self.prompts.append([chosen.randrange(self.config.vocab_size) for _ in range(length)])
                given = dict(temperature=0.9, seed=len(self.params), max_tokens=options.max_tokens, ignore_eos=True)
                self.params.append(SamplingParams(**given | group[i % len(group)]))
        self.longest = options.context + tenth + options.max_tokens + 1

    def run(self):
        """Answer all requests in all ways, one LLM after the other."""
        save_tree(TREES["tree of 24"], self.folder / "tree.json")
        where = dict(dtype=getattr(torch, self.options.dtype), device=torch.device(self.device))
        for way in HEADS:
            if way in self.ways:
                save_random_head(way.replace(" ", "_"), self.config, self.options.depth, self.folder / way, **where)
        self.answer_first()
        for way in self.ways:
            self.try_way(way)

    def answer_first(self):
        with self.llm(self.options.reference) as llm:
            self.known = self.answer(llm, self.options.reference, "plain", range(len(self.prompts)))

    def try_way(self, way):
        with self.llm(self.options.ranks, speculative_config=self.drafting(way)) as llm:
            self.answer(llm, self.options.ranks, way, range(len(self.prompts)), self.known)
            self.answer(llm, self.options.ranks, way, self.alone, [self.known[i] for i in self.alone], at_once=1)
            llm.engine.check()

    def llm(self, ranks, **options):
        asked, own = self.options, dict(max_model_len=self.longest)
        own |= dict(dtype=asked.dtype, max_num_seqs=asked.batch, tensor_parallel_invariant=asked.invariant)
        return llm_on_ranks(self.config, ranks, self.device, **own, **options)

    def drafting(self, way):
        """speculative_config of a way of drafting."""
        depth = {"num_speculative_tokens": self.options.depth}
        return {
            "plain": None,
            "medusa": {"model": str(self.folder / "medusa"), "tree": str(self.folder / "tree.json")},
            "eagle3": {"model": str(self.folder / "eagle3"), "tree": "dynamic", **depth},
            "mlp speculator": {"model": str(self.folder / "mlp speculator"), "draft_tensor_parallel_size": 1},
            "draft model": {"method": "draft_model", "model": self.config, **depth},  # the same random weights
            "ngram": {"method": "ngram", **depth},
        }[way]

    def answer(self, llm, ranks, draft, which, expected=None, at_once=None):
        """Answer these requests in shuffled order, and keep a row.  -> their (tokens, log-probabilities), in order"""
        outputs, figures = answer_shuffled(llm, self.prompts, self.params, which, at_once)
        found = [(output.token_ids, output.logprobs) for output in outputs]
        row = {
            "ranks": ranks,
            "draft": draft,
            "batch": at_once or self.options.batch,
            "requests": len(found),
            **figures,
        }
        differing = [(i, a, b) for i, a, b in zip(which, found, expected, strict=True) if a != b] if expected else []
        row["differing"] = len(differing)
        if differing:
            row["first_differences"] = {str(i): first_differences(a, b) for i, a, b in differing}
        self.report.add(row)
        return found


if __name__ == "__main__":
    sys.exit(main())
