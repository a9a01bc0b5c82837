"""Run mixed traffic under memory pressure for minutes: no page is lost, and outputs equal those of requests that ran alone.

    python benchmarks/proofs/long_run.py                     four minutes on the embedded model and its Medusa heads
    python benchmarks/proofs/long_run.py --minutes 0.2 --sample 20

Requests of many lengths arrive and are cancelled at random. The cache holds about half of what they need, so some are preempted.
Some begin alike and share pages, and some ask for filters, penalties or biases. The page pool is checked regularly. At the end a
random sample of the finished outputs is compared with plain decoding of the same requests one by one. Exits with 1 if anything
differs.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from headstart.evaluation.results import Report, command_line
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED, EMBEDDED_HEAD = ROOT / "assets" / "stdlib-coder", ROOT / "assets" / "stdlib-coder-medusa"
MAX_NUM_SEQS = 32
IN_THE_HOUSE = 48  # greatest number of requests running or waiting
CHECK_EVERY = 500  # steps between two checks of every page


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="minutes of traffic (default 4)")
    parser.add_argument(
        "--sample", type=int, default=200, help="number of outputs compared with their solo runs (default 200)"
    )
    parser.add_argument("--pages", type=int, default=120, help="pages of the cache, 64 tokens each (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic (default 0)")
    parser.add_argument("--output", help="write the rows as JSON here; a bare NAME: into benchmarks/results")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = command_line("benchmarks/proofs/long_run.py", arguments)
    report = Report("long-run", {}, device, command, vars(options), options.output)
    result = long_run(options.minutes, options.sample, options.pages, options.seed)
    report.rows.append(result)
    report.finish()
    return 1 if result["differing"] or not result["compared"] else 0


def long_run(minutes, num_compared, num_pages, seed):
    """Run traffic for `minutes`, then compare.  -> dict of counts"""
    generator = random.Random(seed)
    llm = LLM(
        EMBEDDED,
        max_model_len=1024,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=num_pages,
        speculative_config={"model": str(EMBEDDED_HEAD), "tree": "static"},
    )
    engine, vocab = llm.engine, llm.engine.decoder.vocab_size
    beginnings = [[generator.randrange(vocab) for _ in range(generator.randrange(1, 400))] for _ in range(12)]
    inputs, alive, finished, num_cancelled, num_steps = {}, {}, [], 0, 0

    def arrive():
        prompt = list(generator.choice(beginnings)) if generator.random() < 0.4 else []
        prompt += [generator.randrange(vocab) for _ in range(generator.randrange(1, 300))]
        temperature = generator.choice([0.0, 0.7, 1.0])
        params = SamplingParams(
            temperature=temperature,
            top_p=0.9 if generator.random() < 0.05 else 1.0,
            top_k=40 if generator.random() < 0.05 else 0,
            min_p=0.05 if generator.random() < 0.05 else 0.0,
            repetition_penalty=1.2 if generator.random() < 0.05 else 1.0,
            frequency_penalty=0.3 if generator.random() < 0.05 else 0.0,
            logit_bias={7: 3.0} if generator.random() < 0.05 else None,
            min_tokens=3 if generator.random() < 0.05 else 0,
            max_tokens=generator.randrange(1, 300),
            ignore_eos=generator.random() < 0.5,
            seed=generator.randrange(2**62),
        )
        submission = llm.session.submit(prompt, params)
        (request,) = submission.requests
        inputs[request.request_id] = (prompt, params)
        alive[request.request_id] = submission

    started = time.monotonic()
    with tqdm(total=round(minutes * 60), unit="s", desc="traffic", dynamic_ncols=True) as bar:
        while alive or time.monotonic() - started < minutes * 60:
            elapsed = time.monotonic() - started
            while elapsed < minutes * 60 and len(alive) < IN_THE_HOUSE:
                arrive()
            for request in llm.session.step():
                if request.finished:
                    finished.append(request)
                    del alive[request.request_id]
            if alive and generator.random() < 0.02:
                llm.session.cancel(alive.pop(generator.choice(list(alive))))
                num_cancelled += 1
            num_steps += 1
            if num_steps % CHECK_EVERY == 0:
                engine.check()
            bar.update(min(round(elapsed), bar.total) - bar.n)
    engine.check()
    assert engine.num_free_pages == num_pages, "a page was lost"

    sample = generator.sample(finished, min(num_compared, len(finished)))
    alone = LLM(llm, max_model_len=1024, max_num_seqs=1, enable_prefix_caching=False)
    differing = 0
    for request in tqdm(sample, desc="solo runs", dynamic_ncols=True):
        prompt, params = inputs[request.request_id]
        (output,) = alone.generate([prompt], params)
        differing += output.outputs[0].token_ids != request.output_token_ids
    metrics = llm.get_stats()
    return {
        "minutes": minutes,
        "steps": num_steps,
        "finished": len(finished),
        "cancelled": num_cancelled,
        "emitted_tokens": metrics["num_generated_tokens"],
        "preemptions": metrics["num_preemptions"],
        "prompt_tokens_found_in_the_cache": metrics["prefix_cache_hits"],
        "acceptance_length": round(metrics["acceptance_length"], 3),
        "compared": len(sample),
        "differing": differing,
    }


if __name__ == "__main__":
    sys.exit(main())
