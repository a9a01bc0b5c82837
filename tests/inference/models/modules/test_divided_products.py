"""Products whose output features ranks divide: each has as many, together they are all, and the parts are read alone."""

import pytest
import torch

from headstart.inference.models import divided_weight
from headstart.inference.models.divided_weight import new_of_ranks, rows_of_rank
from headstart.inference.models.modules.divided_products import FeatureDivision
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.inference.models.modules.module_source import load_module, on_meta
from headstart.inference.models.transport import Alone
from headstart.tests.inference.models.small_architectures import small_model


class Place(Alone):
    """A rank that calls nobody."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def divisions(size):
    return [FeatureDivision(Place(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("features", [5, 16, 40, 97, 256, 32003])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_have_equally_many_features_and_together_all(features, size):
    numbers, new = torch.arange(features), list(new_of_ranks(features, size))
    parts = [numbers[rows.start : rows.stop] for rows in (rows_of_rank(features, rank, size) for rank in range(size))]
    assert len({len(part) for part in parts}) == 1
    assert torch.equal(torch.cat([part[own] for part, own in zip(parts, new)]), numbers)
    assert len(parts[0]) <= -(-features // size) + 15


@pytest.fixture
def mixtral(tmp_path, monkeypatch):
    """A small model, its folder, and the decoders of two ranks on it."""
    monkeypatch.setattr(divided_weight, "SMALL", 0)
    model = small_model("mixtral", vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    model.save_pretrained(tmp_path)
    device, decoders = torch.device("cpu"), []
    for division in divisions(2):
        module = load_module(tmp_path, model.config, torch.float32, device, division)
        decoders.append(ModuleDecoder(module, 200, division, device))
    return model, decoders


def test_ranks_hold_their_features_and_together_the_whole(mixtral):
    model, decoders = mixtral
    assert torch.equal(torch.cat([one.lm_head for one in decoders]), model.lm_head.weight)
    assert all(torch.equal(one.embedding, model.model.embed_tokens.weight) for one in decoders)
    whole, *parts = (one.model.layers[1].mlp.experts for one in (model, *(one.module for one in decoders)))
    assert torch.equal(torch.cat([part.down_proj for part in parts], 1), whole.down_proj)
    gates_and_ups = [part.gate_up_proj.unflatten(1, (2, -1)) for part in parts]
    assert torch.equal(torch.cat(gates_and_ups, 2).flatten(1, 2), whole.gate_up_proj)


def test_the_bytes_of_a_rank_are_known_before_it_loads(mixtral):
    model, decoders = mixtral
    for one in decoders:
        held = one.weight_bytes + one.embedding.nbytes
        assert one.division.held_bytes(on_meta(model.config), torch.float32) == held
        assert one.division.held_bytes(on_meta(model.config), torch.bfloat16) == held // 2


def test_weights_that_something_else_reads_too_are_held_whole(monkeypatch):
    """A linear that a module does not only multiply by."""
    monkeypatch.setattr(divided_weight, "SMALL", 0)
    model, device = small_model("opt"), torch.device("cpu")
    layer = model.model.decoder.layers[0]
    layer.fc2.forward = lambda x: torch.nn.functional.linear(x, 2 * layer.fc2.weight, layer.fc2.bias)
    ModuleDecoder(model, 200, divisions(2)[1], device)
    assert layer.fc2.weight.shape == (48, 80)
    assert layer.fc1.weight.numel() == 0
