"""Which devices take tensor maps and launches that overlap, asked of cards that are not here."""

from types import SimpleNamespace

import pytest
import torch

from headstart.kernels import overlap as overlap_module
from headstart.kernels.linear.linear_prefill import maps_fit


@pytest.fixture
def card(monkeypatch):
    """Pretends that the device has a compute capability, on CUDA or on ROCm.  (capability, hip version) -> a tensor on it"""
    cached = [f for f in vars(overlap_module).values() if hasattr(f, "cache_clear")]

    def pretend(capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        for function in cached:
            function.cache_clear()
        x = torch.zeros(16, 64, dtype=torch.bfloat16)
        return SimpleNamespace(
            dtype=x.dtype, shape=x.shape, data_ptr=x.data_ptr, device=torch.device("cuda", 0), is_cuda=True
        )

    yield pretend
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_nvidia_cards_from_hopper_on_take_tensor_maps_and_overlap(card, capability):
    x = card(capability)
    assert maps_fit(x, x)
    assert overlap_module.overlap(x) == {"OVERLAP": True, "launch_pdl": True}


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((8, 6), None), ((8, 9), None), ((9, 4), "6.4")])
def test_older_cards_and_rocm_take_neither(card, capability, hip):
    x = card(capability, hip)
    assert not maps_fit(x, x)
    assert overlap_module.overlap(x) == {"OVERLAP": False}
