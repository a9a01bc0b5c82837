"""The proof by compiling: a GPU's launches are counted, and those that do not fit are named."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")
from headstart.benchmarks.proofs import compiled_launches
from headstart.benchmarks.proofs.compiled_launches import compile_launches

CASE = ("RTX 4090", "qwen2.5-0.5b", "bfloat16")


def test_launches_that_do_not_fit_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = compile_launches(CASE, (1,))
    assert row["target"] == "sm_89"
    assert row["launches"] > 8
    assert row["not_compiled"] == []
    assert row["too_large"] == {}
    assert 0 < row["largest"] <= row["shared_memory"] == 99 << 10
    # No launch of attention is made for so little.
    small = replace(compiled_launches.GPUS[CASE[0]], shared_memory=8 << 10)
    monkeypatch.setitem(compiled_launches.GPUS, small.name, small)
    row = compile_launches(CASE, (1,))
    assert any("attention" in launch for launch in row["too_large"])
    assert row["too_large"][row["largest_launch"]] == row["largest"]
