"""The dtype of a target on a CPU. (Its other sources: test_weights.py, test_checkpoint_files.py.)"""

import platform

import pytest
import torch

from headstart.inference.models.target_source import settled_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("machine", "yes", "dtype"),
    [
        ("x86_64", (), torch.float32),
        ("x86_64", ("_is_avx512_bf16_supported",), torch.bfloat16),
        ("AMD64", ("_is_amx_tile_supported",), torch.bfloat16),
    ],
)
def test_a_cpu_takes_bfloat16_if_it_has_instructions_for_it(monkeypatch, machine, yes, dtype):
    """It was measured once: beside other work float32 won now and then, and a restarted server gave other answers."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda found=name in yes: found)
    assert settled_dtype(None, "auto", CPU) == dtype
