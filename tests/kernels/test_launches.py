"""Launches on GPUs that are not there: an H200 keeps those it was measured with, and what smaller GPUs get fits them.

After a launch was changed on purpose, write the H200's anew:  python tests/kernels/test_launches.py
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
from headstart.benchmarks.proofs.absent_gpu import GPUS
from headstart.benchmarks.proofs.compiled_launches import DTYPES, describe, launches_of, make_module

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


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({f"{model} {dtype}": h200_launches(model, dtype) for model, dtype in CASES}, indent=0)
    )
