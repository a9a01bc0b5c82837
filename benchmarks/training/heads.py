"""Tokens per step of several heads on one target, with 95 % intervals: a chain, and the best tree of at most 64 nodes.

    python benchmarks/training/heads.py --head medusa=runs/medusa --head eagle3=runs/eagle3
    python benchmarks/training/heads.py --head kl=runs/a --head lk=runs/b --requests 32 --temperature 1.0 --output found.json

Trees are built for each head from rates measured on other prompts. For heads that look at their own tokens, trees grown in every
step are measured too, and the better one is marked. Prompts are held out; the verifier is `strict`, so all heads write the same
text.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from headstart.evaluation.acceptance import acceptance_interval, measure_acceptance
from headstart.evaluation.results import Report, command_line
from headstart.inference.llm import LLM
from headstart.inference.prompt_files import read_prompts, render_prompt
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.options import SpeculativeOptions
from headstart.inference.speculation.proposers import find_proposer
from headstart.inference.speculation.tree import MAX_NODES, GrowingTree, build_static_tree, save_tree

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "stdlib-coder"
FOR_RATES = 32  # prompts that trees are built on; the others are for measuring


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", required=True, metavar="NAME=HEAD", help="may be given again")
    parser.add_argument(
        "--target", default=str(TARGET), help="with a heldout.jsonl beside it (default: the embedded one)"
    )
    parser.add_argument("--chain", type=int, default=4, help="depth of the chain (default 4)")
    parser.add_argument(
        "--depth", type=int, default=6, help="greatest depth of trees (default 6, or the head's if less)"
    )
    parser.add_argument(
        "--nodes", type=int, default=MAX_NODES, help=f"greatest number of nodes of a tree (default {MAX_NODES})"
    )
    parser.add_argument(
        "--requests", type=int, default=96, help="requests per head, draft and temperature (default 96)"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens per request (default 96)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0 and 1)")
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    heads = dict(one.split("=", 1) for one in options.head)
    base = LLM(options.target, max_num_seqs=1, num_gpu_blocks_override=32, enforce_eager=True)
    if base.device.type == "cpu":
        torch.set_num_threads(1)
    prompts = [render_prompt(base.tokenizer, prompt) for prompt in read_prompts(Path(options.target) / "heldout.jsonl")]
    report = Report(
        "heads", {}, base.device, command_line("benchmarks/training/heads.py", arguments), vars(options), options.output
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, head in heads.items():
            source = find_proposer(SpeculativeOptions(model=head), base.config)
            for temperature in options.temperature or (0.0, 1.0):
                drafts = build_drafts(base, source, prompts[:FOR_RATES], temperature, options, Path(scratch))
                found = []
                for draft, tree in drafts.items():
                    row = {"head": name, "method": source.method, "temperature": temperature, "draft": draft}
                    row |= measure(base, source, prompts[FOR_RATES:], temperature, tree, options)
                    found.append(row)
                best = max(found[1:], key=lambda row: row["acceptance_length"])
                for row in found:
                    row["best_tree"] = row is best
                    print(
                        f"{name:20} T {temperature:g}  {row['draft']:22} {row['acceptance_length']:.3f} tokens per step, 95 % "
                        f"{row['low']:.3f} to {row['high']:.3f} ({row['steps']} steps){', the better tree' * row['best_tree']}",
                        flush=True,
                    )
                rows += found
    report.rows = rows
    report.finish()
    return 0


def build_drafts(base, source, prompts, temperature, options, scratch):
    """{name of a draft: value of `tree`}: the chain, the static tree and, if the head can, the dynamic tree."""
    depth = min(options.depth, source.max_depth)
    llm = speculating(base, source, "chain", depth)
    params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=1, ignore_eos=True)
    rates = measure_acceptance(llm, prompts, params)["rates"]
    static = build_static_tree(rates, options.nodes)
    save_tree(static, scratch / "static.json", rates)
    chain = min(options.chain, source.max_depth)
    drafts = {
        f"chain of {chain}": ("chain", chain),
        f"static tree of {static.num_nodes}": (str(scratch / "static.json"), None),
    }
    if source.method != "medusa":
        dynamic = GrowingTree(depth, 8, options.nodes)
        save_tree(dynamic, scratch / "dynamic.json")
        drafts[f"dynamic tree of {dynamic.num_nodes}"] = (str(scratch / "dynamic.json"), None)
    return drafts


def speculating(base, source, tree, depth=None):
    head = source.head.to(base.device, base.dtype).eval()
    speculative = {"model": head, "tree": tree, "num_speculative_tokens": depth}
    return LLM(base, max_num_seqs=16, max_model_len=1024, speculative_config=speculative)


def measure(base, source, prompts, temperature, tree, options):
    """Acceptance length of one draft, and its interval."""
    llm = speculating(base, source, *tree)
    params = [
        SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=i, ignore_eos=True)
        for i in range(options.requests)
    ]
    outputs = llm.generate([prompts[i % len(prompts)] for i in range(options.requests)], params, use_tqdm=True)
    return acceptance_interval(outputs)


if __name__ == "__main__":
    sys.exit(main())
