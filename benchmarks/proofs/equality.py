"""Prove that speculation changes no bit: plain decoding against every way of drafting, tokens and logprobs, on a GPU or CPU.

    python benchmarks/proofs/equality.py                     at least a million emitted tokens; a few minutes on one H200
    python benchmarks/proofs/equality.py --requests 8 --max-tokens 40 --target embedded

Targets: the embedded model, and a random model of two layers as wide as an 8B Llama-3. Drafters: Medusa heads (trained ones for
the embedded model, untrained ones for the wide one), and an oracle that knows the plain outputs and is wrong half of the time, so
that accepted paths of every length occur. Runs, per target, dtype and temperature: all requests plainly in one batch; a few of them
again alone, with their logprobs; then every tree in batches of several sizes, in shuffled order. All runs are repeated with mixed
requests, each of which asks for something different (filters, penalties, biases ...). Exits with 1 if anything differs. With
--output the rows so far are kept beside it while it runs, so that a run that is cut loses nothing.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch

from headstart.evaluation.results import Report, command_line, decimals, plain
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.options import EngineOptions
from headstart.inference.llm import LLM
from headstart.inference.models.shapes import config_of
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.oracle import OracleDrafter
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.tree import build_static_tree, chain

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED, EMBEDDED_HEAD = ROOT / "assets" / "stdlib-coder", ROOT / "assets" / "stdlib-coder-medusa"
TREES = {
    "chain of 1": chain(1),
    "chain of 4": chain(4),
    "tree of 24": build_static_tree([[0.6, 0.3, 0.2, 0.1], [0.5, 0.3, 0.1], [0.5, 0.2], [0.4, 0.2], [0.4]], 24),
    "tree of 64": build_static_tree([[0.3] * 10, [0.2] * 8, [0.2] * 8, [0.1] * 4], 64),
}
COLUMNS = {
    "target": ("target", 8, plain),
    "dtype": ("dtype", 8, plain),
    "parameters": ("parameters", 11, plain),
    "temperature": ("T", 3, decimals(1)),
    "draft": ("draft", 29, plain),
    "batch": ("batch", 5, plain),
    "requests": ("requests", 8, plain),
    "tokens": ("tokens", 6, plain),
    "acceptance_length": ("per step", 8, decimals(3)),
    "differing": ("differing", 9, plain),
    "seconds": ("seconds", 7, decimals(1)),
}
# Parameters that mixed requests take in turn.
MIXED = [
    {},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {5: 4.0, 17: -100.0}, "top_k": 400},
    {"allowed_token_ids": list(range(3, 2003, 2)), "frequency_penalty": 0.7},
    {"temperature": 0.3, "top_p": 0.7, "repetition_penalty": 0.9},
]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", action="append", choices=["embedded", "wide"], help="may be given again (default: both)"
    )
    parser.add_argument(
        "--dtype", action="append", choices=["bfloat16", "float16", "float32"], help="default: both halves"
    )
    parser.add_argument("--requests", type=int, default=96, help="requests per run (default 96)")
    parser.add_argument("--max-tokens", type=int, default=320, help="new tokens per request (default 320)")
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    parser.add_argument("--commit", help="commit of the code, if this is not a git checkout")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # as the commands do with models this small
    command = command_line("benchmarks/proofs/equality.py", arguments)
    report = Report("equality", COLUMNS, device, command, vars(options), options.output, options.commit)
    for target in options.target or ["embedded", "wide"]:
        for dtype in options.dtype or ["bfloat16", "float16"]:
            compare_target(report, target, dtype, device, options.requests, options.max_tokens)
            torch.cuda.empty_cache()
    differing = sum(row["differing"] for row in report.rows)
    report.state(
        f"\n{differing} requests differ",
        speculated_tokens=sum(row["tokens"] for row in report.rows if row["draft"] != "plain"),
        emitted_tokens=sum(row["tokens"] for row in report.rows),
        differing_requests=differing,
    )
    report.finish()
    return 1 if differing else 0


def make_llm(target, dtype, device, **options):
    """The embedded target, or a random one of an 8B's width."""
    shared = dict(dtype=dtype, device=device, max_model_len=2048, seed=0, **options)
    if target == "embedded":
        return LLM(EMBEDDED, **(shared | {"max_model_len": 1024}))
    return LLM(config_of("llama-3-8b-2layers"), load_format="dummy", **shared)


def make_prompts(llm, count, generator):
    """Random tokens of mixed lengths: many at the borders of tiles (64) and chunks (256)."""
    room = llm.max_model_len // 2
    borders = [n + d for n in (16, 64, 128, 256, 512) for d in (-1, 0, 1)]
    lengths = [
        generator.choice(borders) if generator.random() < 0.5 else generator.randrange(1, room) for _ in range(count)
    ]
    vocab = llm.engine.decoder.vocab_size
    return [[generator.randrange(vocab) for _ in range(min(length, room))] for length in lengths]


def with_oracle(llm, known, prompts, tree, batch):
    """The LLM's engine rebuilt with a drafter that knows the outputs."""
    decoder = llm.engine.decoder
    drafter = OracleDrafter(known, [len(p) for p in prompts], 0.55, decoder.vocab_size, decoder.device)
    other = LLM(llm, max_model_len=llm.max_model_len, max_num_seqs=1, num_gpu_blocks_override=64, enforce_eager=True)
    options = EngineOptions(llm.max_model_len, max_num_seqs=batch)
    other.session.engine = Engine.build(decoder, llm.eos_token_ids, options, Speculation(drafter, tree))
    return other


def compare_target(report, target, dtype, device, num_requests, max_tokens):
    """Add the rows of one target and dtype to the report."""
    base = make_llm(target, dtype, device, max_num_seqs=min(64, num_requests))
    prompts = make_prompts(base, num_requests, random.Random(1))
    for temperature, mixed in ((0.0, [{}]), (0.8, [{}]), (0.8, MIXED)):
        labels = {"target": target, "dtype": dtype, "parameters": "mixed" if len(mixed) > 1 else "temperature"}
        Comparison(report, base, prompts, temperature, mixed, max_tokens, labels).run(medusa_heads(target, base))


class Comparison:
    """All ways of answering the same requests at one temperature; each request also takes one of the parameters in `mixed`."""

    def __init__(self, report, base, prompts, temperature, mixed, max_tokens, labels):
        self.report = report
        self.base, self.prompts, self.temperature, self.max_tokens = base, prompts, temperature, max_tokens
        self.mixed = mixed
        self.labels, self.random = labels, random.Random(2)

    def answer(self, llm, which, logprobs=None, tokens=None):
        """Requests `which` in shuffled order.  -> {request: (token ids, (logprobs, those of the prompt))}"""
        order = list(which)
        self.random.shuffle(order)
        shared = dict(temperature=self.temperature, max_tokens=tokens or self.max_tokens, ignore_eos=True)
        shared |= dict(logprobs=logprobs, prompt_logprobs=logprobs)
        params = [SamplingParams(seed=i, **(shared | self.mixed[i % len(self.mixed)])) for i in order]
        outputs = llm.generate([self.prompts[i] for i in order], params)
        return {i: (o.outputs[0].token_ids, (o.outputs[0].logprobs, o.prompt_logprobs)) for i, o in zip(order, outputs)}

    def add(self, draft, llm, which, expected, **options):
        """Answer, compare with the expected answers (None: nothing yet), and add a row.  -> the answers"""
        started = time.perf_counter()
        found = self.answer(llm, which, **options)
        row = self.labels | {
            "temperature": self.temperature,
            "draft": draft,
            "batch": llm.engine.max_num_seqs,
            "requests": len(found),
            "tokens": sum(len(tokens) for tokens, _ in found.values()),
            "acceptance_length": round(llm.engine.metrics.spec_decode.acceptance_length, 3),
            "differing": sum(found[i] != expected[i] for i in found) if expected else 0,
            "seconds": round(time.perf_counter() - started, 1),
        }
        self.report.add(row)
        llm.engine.check()
        return found

    def run(self, heads):
        """heads: speculative_configs by name"""
        everyone = range(len(self.prompts))
        few = sorted(self.random.sample(everyone, min(6, len(everyone))))
        short = dict(logprobs=2, tokens=min(48, self.max_tokens))
        plain = self.add("plain", self.base, everyone, None)
        alone = LLM(self.base, max_model_len=self.base.max_model_len, max_num_seqs=1, enable_prefix_caching=False)
        self.add("plain", alone, few, plain)
        scored = self.add("plain, logprobs", alone, few, None, **short)
        assert all(scored[i][0] == plain[i][0][: short["tokens"]] for i in few)
        known = [plain[i][0] for i in everyone]
        for name, tree in TREES.items():
            for batch in (1, 8, 64):
                llm = with_oracle(self.base, known, self.prompts, tree, batch)
                self.add(f"oracle, {name}", llm, few if batch == 1 else everyone, plain)
                if batch == 8:
                    self.add(f"oracle, {name}, logprobs", llm, few, scored, **short)
        for name, config in heads.items():
            llm = LLM(self.base, max_model_len=self.base.max_model_len, max_num_seqs=32, speculative_config=config)
            self.add(f"medusa, {name}", llm, everyone, plain)


def medusa_heads(target, base):
    """speculative_configs by name."""
    if target == "embedded":
        return {
            "chain": {"model": str(EMBEDDED_HEAD)},
            "static tree": {"model": str(EMBEDDED_HEAD), "tree": "static"},
            "chain, fp8": {"model": str(EMBEDDED_HEAD), "quantization": "fp8"},
        }
    decoder, found = base.engine.decoder, {}
    for shared in (False, True):
        shape = dict(hidden_size=decoder.hidden_size, vocab_size=decoder.vocab_size, num_heads=4)
        with torch.device(decoder.device):
            head = Medusa(MedusaConfig(shared_lm_head=shared, **shape)).to(decoder.dtype).eval()
        head.initialize_from_target(decoder.lm_head, decoder.embedding)
        found["random, shared lm_head" if shared else "random, own lm_heads"] = {"model": head}
    own = found["random, own lm_heads"]
    return found | {"random, own lm_heads, fp8": own | {"quantization": "fp8"}}


if __name__ == "__main__":
    sys.exit(main())
