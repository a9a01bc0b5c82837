"""Compile every launch that the engine's decoder makes on GPUs that are not there, and compare shared memory with what they have.

    python benchmarks/proofs/compiled_launches.py --output compiled-launches
    python benchmarks/proofs/compiled_launches.py --gpus "RTX 4090" --models llama-3-8b --dtypes bfloat16

A decoder of one layer and of a model's shape runs passes without contents (absent_gpu.py): trees, chains, prompts and logits, 1 to
8192 rows, short and long contexts. Every launch is compiled for the GPU's architecture. A row of the report counts the launches of
one GPU, model and dtype, and names the largest. Exits with 1 if a launch takes more shared memory than the GPU has, or does not
compile. The last line is JSON. No GPU is needed. Not shown: that the launches run there, their speed, their bits. Not compiled:
kernels after the logits (sampling, verifiers), whose blocks are vectors.
"""

import argparse
import multiprocessing
import os
import sys

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.benchmarks.proofs.absent_gpu import GPUS, AbsentGpu
from headstart.evaluation.results import Report, command_line, plain
from headstart.inference.models.decoder import Decoder, ForwardPass
from headstart.inference.models.shapes import SHAPES
from headstart.kernels.attention.attention_fold import PAGE
from headstart.kernels.attention.mixed_attention import MixedIndex
from headstart.kernels.attention.prefill_attention import PrefillIndex
from headstart.kernels.attention.tree_attention import TreeIndex

ROWS = (1, 16, 17, 33, 64, 65, 80, 81, 96, 97, 128, 129, 160, 192, 256, 320, 384, 512, 768, 1000, 2048, 8192)
CONTEXTS = (2048, 65536)  # positions: the second has far chunks
TREE = 16  # nodes
_LLAMA = dict(model_type="llama", rope_parameters=dict(rope_type="default", rope_theta=10000.0))
MODELS = {
    "llama-3-8b": SHAPES["llama-3-8b"],
    "llama-2-7b": SHAPES["llama-2-7b"],
    "mistral-7b": SHAPES["mistral-7b"],  # sliding window
    # Qwen2.5-0.5B: biases and heads of 64.
    "qwen2.5-0.5b": SHAPES["qwen2.5-7b"]
    | dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936),
    # The sizes of Gemma-7B, heads of 256, as a Llama.
    "gemma-7b-sizes": _LLAMA
    | dict(hidden_size=3072, intermediate_size=24576, num_attention_heads=16, num_key_value_heads=16, head_dim=256)
    | dict(vocab_size=256000),
}
# In bfloat16 all models; in the other dtypes some.
OTHER_DTYPES = {"float16": ["llama-3-8b"], "float32": ["llama-3-8b", "qwen2.5-0.5b", "gemma-7b-sizes"]}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_module(model, dtype):
    """A transformers model of one layer, without contents."""
    config = AutoConfig.for_model(**MODELS[model] | dict(num_hidden_layers=1), bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def integers(*shape):
    return torch.empty(*shape, dtype=torch.int32, device="cuda")


def indices(rows, context, num_kv_heads):
    """The ways in which so many rows can attend, by name: one tree, trees and chains of a batch, prompts, and both."""

    def trees(batch, nodes, is_chain):
        table = integers(batch, context // PAGE)
        depths = integers(batch, nodes)
        ancestors = integers(batch, nodes, 6)
        return TreeIndex(table, integers(batch), depths, depths, ancestors, num_kv_heads, None, is_chain)

    def prompts(*counts):
        requests = len(counts)
        table = integers(requests, context // PAGE)
        return PrefillIndex(table, integers(requests), integers(requests), counts, num_kv_heads, rows)

    if rows <= 1024:
        yield "chains of 1", trees(rows, 1, True)
    if 128 < rows <= 1024:
        table, known = integers(16, context // PAGE), rows // 2
        beside = PrefillIndex(table, integers(16), integers(16), None, num_kv_heads, known)
        yield "chains beside prompts", MixedIndex(trees(rows - known, 1, True), beside)
    if rows <= 128:
        yield "a tree", trees(1, rows, False)
        yield "a chain", trees(1, rows, True)
    elif rows % TREE == 0 and rows <= 2048:
        yield "trees", trees(rows // TREE, TREE, False)
    if rows > 1:
        yield "a prompt", prompts(rows)
        yield "two prompts", prompts(rows // 2, rows - rows // 2)


def launches_of(gpu, module, row_counts=ROWS):
    """Launches of every pass, {(rows, context, kind of pass): [Launch]}."""
    found = {}
    with AbsentGpu(gpu) as absent:
        decoder = Decoder.from_module(module, max(CONTEXTS))
        layers, heads, dim, dtype = decoder.kv_shape
        kv = torch.empty(layers, 2, max(CONTEXTS) * heads, dim, dtype=dtype, device="cuda")
        for rows in row_counts:
            for context in CONTEXTS:
                for kind, index in indices(rows, context, heads):
                    absent.launches.clear()
                    hidden, _ = decoder.forward(ForwardPass(integers(rows), integers(rows), integers(rows), index), kv)
                    decoder.logits(hidden)
                    found[rows, context, kind] = list(absent.launches)
    return found


def compile_launches(case, row_counts=ROWS):
    """The row of the report of a case (name of a GPU, model, name of a dtype)."""
    gpu, model, dtype = case
    gpu = GPUS[gpu]
    passes = launches_of(gpu, make_module(model, DTYPES[dtype]), row_counts)
    distinct = {launch.key: launch for launches in passes.values() for launch in launches}
    sizes, failures = {}, []
    for launch in distinct.values():
        try:
            sizes[describe(launch)] = launch.compile().metadata.shared
        except Exception as error:  # whatever the compiler raises for a target that it does not know
            failures.append(f"{describe(launch)}: {type(error).__name__}: {str(error).strip()[:200]}")
    largest = max(sizes, key=sizes.get, default=None)
    return {
        "gpu": gpu.name,
        "target": gpu.target,
        "model": model,
        "dtype": dtype,
        "launches": len(distinct),
        "shared_memory": gpu.shared_memory,
        "largest": sizes.get(largest),
        "largest_launch": largest,
        "too_large": {name: size for name, size in sizes.items() if size > gpu.shared_memory},
        "not_compiled": failures,
    }


def describe(launch):
    """A launch in words: kernel, sizes, warps, stages."""
    sizes = [f"{name}={int(value)}" for name, value in launch.constants.items() if isinstance(value, int)]
    return f"{launch.name} {' '.join(sizes)} warps={launch.options['num_warps']} stages={launch.options['num_stages']}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="*", default=list(GPUS), choices=GPUS)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", help="name or path of the JSON file")
    options = parser.parse_args(arguments)
    columns = {
        "gpu": ("GPU", 9, plain),
        "target": ("target", 7, plain),
        "model": ("model", 14, plain),
        "dtype": ("dtype", 8, plain),
        "launches": ("launches", 8, plain),
        "largest": ("largest", 8, plain),
        "shared_memory": ("limit", 7, plain),
        "too_large": ("too large", 9, lambda found: str(len(found))),
        "not_compiled": ("not compiled", 12, lambda found: str(len(found))),
    }
    settings = {"gpus": options.gpus, "models": options.models, "dtypes": options.dtypes}
    command = command_line("benchmarks/proofs/compiled_launches.py", arguments)
    report = Report("compiled launches", columns, torch.device("cpu"), command, settings, options.output)
    kinds = [(model, dtype) for model in options.models for dtype in options.dtypes]
    kinds = [(model, dtype) for model, dtype in kinds if model in OTHER_DTYPES.get(dtype, MODELS)]
    cases = [(gpu, *kind) for gpu in options.gpus for kind in kinds]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        done = pool.imap(compile_launches, cases)
        for row in tqdm(done, "compiling", len(cases), unit="case", disable=None, dynamic_ncols=True):
            report.add(row)
    report.finish()
    return int(any(row["too_large"] or row["not_compiled"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
