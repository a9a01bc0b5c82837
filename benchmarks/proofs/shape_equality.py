"""Prove that speculation changes no bit of models of published sizes: random weights of a shape, made on the device.

    python benchmarks/proofs/shape_equality.py --shape opt-6.7b --draft-shape opt-125m
    python benchmarks/proofs/shape_equality.py --shape granite-20b-code --head mlp_speculator
    python benchmarks/proofs/shape_equality.py --shape mixtral-8x7b --head eagle

A third of the requests are greedy, a third drawn at temperature 0.9, and in a third each asks for something different, as in
equality.py. Plain decoding answers all in batches of 16, and a few again alone. Then, on the same weights, the drafter answers
them, and an oracle that knows the plain outputs and is wrong half of the time, since random heads are hardly ever right: in
batches of 16 and alone. At least --tokens tokens are emitted with speculation. Exits with 1 if a token differs.

Memory: the weights (13, 40 and 93 GB in bf16 for the shapes above), the drafter, and the cache of up to three engines.
"""

import argparse
import random
import sys
import time

import torch

from headstart.benchmarks.proofs.equality import MIXED, TREES, with_oracle
from headstart.benchmarks.random_heads import bytes_with_head, random_head
from headstart.benchmarks.shape import check_fits, config_of_shape
from headstart.evaluation.results import Report, command_line, decimals, plain
from headstart.evaluation.timing import release
from headstart.inference.llm import LLM
from headstart.inference.models.support import weight_bytes
from headstart.inference.sampling_params import SamplingParams

GROUPS = {"greedy": [{"temperature": 0.0}], "temperature 0.9": [{}], "mixed": MIXED}
ORACLES = ("chain of 4", "tree of 24")
ALONE = 2  # requests of each group that are answered alone, too
COLUMNS = {
    "draft": ("draft", 26, plain),
    "batch": ("batch", 5, plain),
    "requests": ("asked for", 15, plain),
    "tokens": ("tokens", 7, plain),
    "acceptance_length": ("accepted", 8, decimals(3)),
    "differing": ("differ", 6, plain),
    "seconds": ("seconds", 7, decimals(1)),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="of the target: a name, or a folder with a config.json")
    drafter = parser.add_mutually_exclusive_group(required=True)
    drafter.add_argument("--draft-shape", help="shape of a draft model")
    drafter.add_argument(
        "--head", choices=["medusa", "mlp_speculator", "eagle", "eagle3", "block"], help="a random head"
    )
    parser.add_argument("--depth", type=int, default=4, help="depth of the drafts (default 4)")
    parser.add_argument("--tokens", type=int, default=20_000, help="least tokens to compare (default 20000)")
    parser.add_argument("--context", type=int, default=1000, help="tokens of a prompt, within a tenth (default 1000)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per request (default 128)")
    parser.add_argument("--batch", type=int, default=16, help="requests at once (default 16)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_memory(options, device)
    command = command_line("benchmarks/proofs/shape_equality.py", arguments)
    report = Report("shape-equality", COLUMNS, device, command, vars(options), options.output)
    proof = Proof(options, device, report)
    proof.run()
    differing = sum(row["differing"] for row in report.rows)
    speculated = sum(row["tokens"] for row in report.rows if row["draft"] != "plain")
    report.state(
        f"{differing} requests differ over {speculated} tokens emitted with speculation",
        speculated_tokens=speculated,
        differing_requests=differing,
    )
    report.finish()
    if speculated < options.tokens:
        raise RuntimeError(f"only {speculated} tokens were compared, not {options.tokens}")
    return 1 if differing else 0


def _check_memory(options, device):
    def needed(config, dtype):
        if options.head:
            return bytes_with_head(config, dtype, options.head, options.depth)
        return weight_bytes(config, dtype) + weight_bytes(config_of_shape(options.draft_shape), dtype)

    dtype = getattr(torch, options.dtype)
    check_fits(options.shape, device, dtype, num_bytes=needed, what="the weights and the drafter")


class Proof:
    """The target, its requests, and what plain decoding answers."""

    def __init__(self, options, device, report):
        self.options, self.report = options, report
        self.config = config_of_shape(options.shape)
        trees = self.trees = ["chain", "dynamic"] if options.head in ("eagle", "eagle3", "block") else ["chain"]
        # Tokens of one request of each group in all batches, and of those that are answered alone.
        each, alone = len(GROUPS) * (len(trees) + len(ORACLES)), len(GROUPS) * ALONE * (len(trees) + 1)
        per_group = max(options.batch, -(-(options.tokens // options.max_tokens + 1 - alone) // each))
        self.groups = {name: range(i * per_group, (i + 1) * per_group) for i, name in enumerate(GROUPS)}
        chosen, tenth = random.Random(1), options.context // 10
        self.prompts, self.params = [], []
        for name, members in self.groups.items():
            for i in members:
                length = options.context + chosen.randint(-tenth, tenth)
                self.prompts.append([chosen.randrange(self.config.vocab_size) for _ in range(length)])
                # An oracle knows a request by its seed.
                given = dict(temperature=0.9, seed=i, max_tokens=options.max_tokens, ignore_eos=True)
                self.params.append(SamplingParams(**given | GROUPS[name][i % len(GROUPS[name])]))
        longest = options.context + tenth + options.max_tokens + 1
        self.base = LLM(
            self.config,
            load_format="dummy",
            dtype=options.dtype,
            device=device,
            max_model_len=longest,
            max_num_seqs=options.batch,
        )
        self.known = [None] * len(self.prompts)

    def run(self):
        """Answer all requests in all ways, one engine after the other."""
        few = {name: [members[0], members[-1]][:ALONE] for name, members in self.groups.items()}
        for name, members in self.groups.items():
            for i, tokens in zip(members, self.answer("plain", self.base, name, members)):
                self.known[i] = tokens
        # The prompts are computed anew: they are not found in a cache.
        self.try_all("plain", self.share(1, enable_prefix_caching=False), few)
        decoder = self.base.engine.decoder
        if self.options.head:
            name, model = self.options.head, random_head(self.options.head, self.config, decoder, self.options.depth)
        else:
            name, model = self.options.draft_shape, config_of_shape(self.options.draft_shape)
        for tree in self.trees:
            how = {"model": model, "num_speculative_tokens": self.options.depth, "tree": tree}
            for batch, which in ((self.options.batch, self.groups), (1, few)):
                self.try_all(f"{name}, {tree}", self.share(batch, speculative_config=how), which)
        for tree in ORACLES:
            llm = with_oracle(self.base, self.known, self.prompts, TREES[tree], self.options.batch)
            self.try_all(f"oracle, {tree}", llm, self.groups)
            del llm
        llm = with_oracle(self.base, self.known, self.prompts, TREES[ORACLES[-1]], 1)
        self.try_all(f"oracle, {ORACLES[-1]}", llm, few)

    def share(self, batch, **options):
        return LLM(self.base, max_model_len=self.base.max_model_len, max_num_seqs=batch, **options)

    def try_all(self, draft, llm, groups):
        """Answer requests {group: which} and compare with plain decoding."""
        for name, which in groups.items():
            self.answer(draft, llm, name, which, [self.known[i] for i in which])
        llm.engine.check()
        del llm
        release(self.base.device)

    def answer(self, draft, llm, group, which, expected=None):
        """Answer these requests in shuffled order, and keep a row.  -> their tokens, in order"""
        outputs, figures = answer_shuffled(llm, self.prompts, self.params, which)
        found = [output.token_ids for output in outputs]
        row = {
            "draft": draft,
            "batch": llm.engine.max_num_seqs,
            "requests": group,
            "num_requests": len(found),
            **figures,
        }
        row["differing"] = sum(a != b for a, b in zip(found, expected)) if expected else 0
        self.report.add(row)
        return found


def answer_shuffled(llm, prompts, params, which, at_once=None):
    """Answer the requests `which` in shuffled order, so many at a time (None: all).  -> (their outputs in order, figures)"""
    order = random.Random(2).sample(list(which), len(which))
    drafts, started, found = llm.engine.metrics.spec_decode, time.perf_counter(), {}
    steps, accepted = drafts.num_steps, list(drafts.accepted_per_position)
    for start in range(0, len(order), at_once or len(order)):
        some = order[start : start + (at_once or len(order))]
        outputs = llm.generate([prompts[i] for i in some], [params[i] for i in some])
        found |= {i: output.outputs[0] for i, output in zip(some, outputs)}
    seconds = time.perf_counter() - started
    accepted += [0] * (len(drafts.accepted_per_position) - len(accepted))
    accepted = [now - before for now, before in zip(drafts.accepted_per_position, accepted)]
    figures = {
        "tokens": sum(len(output.token_ids) for output in found.values()),
        "acceptance_length": 1 + sum(accepted) / max(drafts.num_steps - steps, 1),
        "accepted_per_position": accepted,
        "seconds": seconds,
    }
    return [found[i] for i in which], figures


if __name__ == "__main__":
    sys.exit(main())
