"""Launches on GPUs that are not there: an H200 keeps those it was measured with, and what smaller GPUs get fits them.

After a launch was changed on purpose, write the H200's anew:  python tests/kernels/test_shared_memory.py
"""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from headstart.benchmarks.proofs.absent_gpu import GPUS, AbsentGpu
from headstart.benchmarks.proofs.compiled_launches import DTYPES, describe, launches_of, make_module
from headstart.kernels.attention import attention_fold
from headstart.kernels.attention.attention_fold import block_rows, count_stages
from headstart.kernels.linear import linear_table
from headstart.kernels.shared_memory import H200, shared_memory

RECORDED = Path(__file__).parent / "h200_launches.json"
ROWS = (1, 17, 64, 80, 128, 129, 320, 1000, 8192)
CASES = [("llama-3-8b", "bfloat16"), ("llama-3-8b", "float32"), ("gemma-7b-sizes", "bfloat16")]


def h200_launches(model, dtype):
    """{launch: numbers of rows that take it}, in words."""
    found = {}
    for (rows, *_), launches in launches_of(GPUS["H200"], make_module(model, DTYPES[dtype]), ROWS).items():
        for launch in launches:
            found.setdefault(describe(launch), set()).add(rows)
    return {launch: " ".join(map(str, sorted(rows))) for launch, rows in sorted(found.items())}


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_an_h200_keeps_the_launches_it_was_measured_with(model, dtype):
    assert h200_launches(model, dtype) == json.loads(RECORDED.read_text())[f"{model} {dtype}"]


def shared_bytes(gpu, model, rows, kernels):
    """{launch: bytes of shared memory} of the kernels whose names begin so, compiled for the GPU."""
    found = {}
    for launches in launches_of(GPUS[gpu], make_module(model, torch.bfloat16), rows).values():
        found |= {launch.key: launch for launch in launches if launch.name.startswith(kernels)}
    return {describe(launch): launch.compile().metadata.shared for launch in found.values()}


@pytest.mark.parametrize(
    ("gpu", "model", "rows", "kernels", "table", "unfit"),
    [
        (
            "RTX 5090",
            "llama-3-8b",
            (2048,),
            ("linear_prefill", "gated"),
            (linear_table, "fit_prefill"),
            lambda x, *_: x,
        ),
        ("RTX 4090", "gemma-7b-sizes", (1,), "tree", (attention_fold, "most_stages"), lambda *_: 9),
    ],
    ids=["products", "attention"],
)
def test_a_gpu_with_little_shared_memory_gets_launches_that_fit(
    gpu, model, rows, kernels, table, unfit, monkeypatch, tmp_path
):
    """Compiled for it; without the choice by shared memory the largest launch would not start."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = shared_bytes(gpu, model, rows, kernels)
    assert found
    assert max(found.values()) <= GPUS[gpu].shared_memory, found
    monkeypatch.setattr(*table, unfit)
    assert max(shared_bytes(gpu, model, rows, kernels).values()) > GPUS[gpu].shared_memory


# (head dimension, dtype, alone): (rows, stages)
WANTED = {(64, "bfloat16", False): (64, 3), (128, "float16", True): (64, 4), (256, "bfloat16", False): (64, 2)}
WANTED |= {(64, "float32", False): (64, 2), (128, "float32", False): (64, 1), (256, "float32", False): (64, 1)}
LITTLE = {(128, "float16", True): (64, 3), (256, "bfloat16", False): (64, 1)}
LITTLE |= {(128, "float32", False): (16, 1), (256, "float32", False): (16, 1)}


@pytest.mark.parametrize("gpu", GPUS)
def test_attention_keeps_the_stages_that_fit_and_its_rows_depend_on_no_batch(gpu):
    expected = {
        "A100": WANTED | {(256, "float32", False): (16, 1)},
        **dict.fromkeys(("RTX 3090", "RTX 4090", "RTX 5090"), WANTED | LITTLE),
    }.get(gpu, WANTED)
    with AbsentGpu(GPUS[gpu]):
        device = torch.device("cuda", 0)
        for (dim, dtype, alone), (rows, stages) in expected.items():
            assert block_rows(dim, DTYPES[dtype], device) == rows
            assert count_stages(dim, DTYPES[dtype], device, alone) == stages


def test_a_cpu_and_the_interpreter_have_the_shared_memory_of_an_h200():
    assert shared_memory(torch.device("cpu")) == H200
    with AbsentGpu(GPUS["H200"]):
        assert shared_memory(torch.device("cuda", 0)) == H200


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({f"{model} {dtype}": h200_launches(model, dtype) for model, dtype in CASES}, indent=2) + "\n"
    )
