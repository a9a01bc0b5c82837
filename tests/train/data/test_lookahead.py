"""What a rank is fed, in order, and the next micro-batch being made beside this one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headstart.train import medusa
from headstart.train.data import lookahead
from headstart.train.data.lookahead import deal_rows, look_ahead
from headstart.train.data.rows import rows_of_step


def test_ranks_and_micro_batches_share_out_the_rows_of_every_step():
    recipe = SimpleNamespace(batch_rows=3, accumulate=2, seed=5)
    ranks = [SimpleNamespace(num_processes=2, process_index=rank) for rank in range(2)]
    dealt = [list(deal_rows(range(4, 7), 31, recipe, rank)) for rank in ranks]
    assert [len(one) for one in dealt] == [6, 6]
    for i, step in enumerate(range(4, 7)):
        parts = [dealt[rank][2 * i + micro] for micro in range(2) for rank in range(2)]
        assert np.concatenate(parts).tolist() == rows_of_step(step, 12, 31, seed=5).tolist()


def test_nothing_is_made_ahead_on_the_cpu():
    made = []
    batches = look_ahead(
        lambda index: (made.append(index) or torch.tensor(index),), iter(range(3)), torch.device("cpu")
    )
    assert not made
    for i in range(3):
        index, tensor = next(batches)
        assert (index, tensor.item(), made) == (i, i, list(range(i + 1)))
    assert next(batches, None) is None


@pytest.mark.gpu
def test_what_is_made_ahead_is_waited_for_and_stays_while_it_is_used(monkeypatch):
    """Both streams are slowed down in turn: a missing wait reads zeros, memory given back too early reads the next one's."""
    device, made = torch.device("cuda"), []
    monkeypatch.setattr(lookahead, "AHEAD", True)

    def make(index):
        made.append(index)
        torch.cuda._sleep(20_000_000)
        return (torch.full((1 << 22,), float(index + 1), device=device),)

    sums = []
    for index, tensor in look_ahead(make, iter(range(6)), device):
        assert len(made) == min(index + 2, 6)
        if index % 2:
            torch.cuda._sleep(60_000_000)
        sums.append(tensor.sum())
        del tensor
    assert [total.item() for total in sums] == [(i + 1) * 2.0**22 for i in range(6)]


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [False, True])
def test_looking_ahead_changes_no_bit(arguments, read_metrics, tmp_path, monkeypatch, cached):
    keys = {"autocast": "bf16", "accumulate": 2, "eval_prompts": 3, "eval_every": 2, "cache_features": cached}
    for ahead in (True, False):
        monkeypatch.setattr(lookahead, "AHEAD", ahead)
        assert medusa.main(arguments(output=tmp_path / str(ahead), **keys)) == 0
    assert read_metrics(run="True") == read_metrics(run="False")
    heads = [load_file(tmp_path / name / "head" / "medusa_lm_head.safetensors") for name in ("True", "False")]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
