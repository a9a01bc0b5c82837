"""Tokens per step of every verifier on the embedded target with its heads, with 95 % intervals.

    python benchmarks/proofs/verifiers.py
    python benchmarks/proofs/verifiers.py --requests 32 --max-tokens 64 --temperature 1.0 --output found.json

Chains and the head's static tree, held-out prompts. `strict` stands twice: with the shared noise it drafts with, and with greedy
drafts. Requests are the unit of the bootstrap: steps of one request are not independent.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch

from headstart.evaluation.acceptance import acceptance_interval
from headstart.evaluation.compare import hardware_name
from headstart.inference.engine.sampling import SamplingParams
from headstart.inference.llm import LLM
from headstart.inference.prompt_files import read_prompts, render_prompt

ROOT = Path(__file__).resolve().parents[2]
TARGET, HEAD = ROOT / "assets" / "stdlib-coder", ROOT / "assets" / "stdlib-coder-medusa"
RULES = {
    "chain": (("strict", None), ("strict", "greedy"), ("token", None), ("block", None)),
    "static": (("strict", None), ("strict", "greedy"), ("recursive", None), ("traversal", None)),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96, help="per verifier, tree and temperature (default 96)")
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens per request (default 96)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0.7 and 1.0)")
    parser.add_argument("--output", help="write the rows as JSON here")
    options = parser.parse_args(arguments)
    base = LLM(TARGET, max_num_seqs=1, num_gpu_blocks_override=32, enforce_eager=True)
    if base.device.type == "cpu":
        torch.set_num_threads(1)
    prompts = [render_prompt(base.tokenizer, prompt) for prompt in read_prompts(TARGET / "heldout.jsonl", count=32)]
    rows = []
    for temperature in options.temperature or (0.7, 1.0):
        for tree, rules in RULES.items():
            for verifier, drafts in rules:
                row = {"temperature": temperature, "tree": tree, "verifier": verifier, "drafts": drafts or "default"}
                row |= measure(base, prompts, row, drafts, options.requests, options.max_tokens)
                rows.append(row)
                print(
                    f"T {temperature:g}  {tree:7} {verifier:10} {row['drafts']:8} {row['acceptance_length']:.3f} tokens per step, "
                    f"95 % {row['low']:.3f} to {row['high']:.3f} ({row['steps']} steps)",
                    flush=True,
                )
    found = {
        "hardware": hardware_name(base.device),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": " ".join(
            ["python", "benchmarks/proofs/verifiers.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "rows": rows,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


def measure(base, prompts, row, drafts, requests, max_tokens):
    """Acceptance length of one verifier, and the interval of its bootstrap."""
    speculative = {"model": str(HEAD), "tree": row["tree"], "verifier": row["verifier"]}
    if drafts:
        speculative["draft_sample_method"] = drafts
    llm = LLM(base, max_num_seqs=16, max_model_len=1024, speculative_config=speculative)
    params = [
        SamplingParams(temperature=row["temperature"], max_tokens=max_tokens, seed=i, ignore_eos=True)
        for i in range(requests)
    ]
    outputs = llm.generate([prompts[i % len(prompts)] for i in range(requests)], params, use_tqdm=True)
    return acceptance_interval(outputs)


if __name__ == "__main__":
    sys.exit(main())
