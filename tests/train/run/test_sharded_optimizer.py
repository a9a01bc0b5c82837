"""AdamW divided over ranks against torch's own on the summed gradients, in forked processes over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headstart.train.run.optimization import build_optimizer, update
from headstart.train.run.sharded_optimizer import ShardedAdamW


class OddHead(nn.Module):
    """Shapes that no number of ranks divides; the largest alone is more than a rank's part."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"a": (7, 5), "b": (3,), "c": (41, 11), "d": (1, 1)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.register_parameter("frozen", nn.Parameter(torch.ones(9), requires_grad=False))


def gradients(head, step, rank):
    """{name: gradient} of one rank in one step; `d` has one in the odd steps only."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    found = {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in head.named_parameters()
        if parameter.requires_grad
    }
    if step % 2 == 0:
        del found["d"]
    return found


def advance(head, optimizer, step, ranks, max_norm, max_value):
    """One step with the gradients of `ranks`: of all of them for torch's optimiser, of this one for the divided."""
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            shares = [gradients(head, step, rank).get(name) for rank in ranks]
            if shares[0] is not None:
                total = sum(shares)
                # As backward does: into what is there, or a tensor of its own.
                parameter.grad = total if parameter.grad is None or name == "a" else parameter.grad.add_(total)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # what a rank without labels adds
    if isinstance(optimizer, ShardedAdamW):
        optimizer.sum_gradients()
    return update(head, optimizer, lr=0.01 * step, max_norm=max_norm, max_value=max_value)


def compare(rank, world, max_norm, max_value):
    """On one rank: equal weights, norms and state, and a state that goes on in torch's optimiser and back."""
    head, whole = OddHead(), OddHead()
    optimizer = build_optimizer(head, 0.1, 0.9, 0.95)
    assert isinstance(optimizer, ShardedAdamW)
    matrices, vectors = [whole.a, whole.c, whole.d], [whole.b]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    empty = optimizer.state_dict()
    assert (empty is None) == (rank > 0)
    assert rank or empty["state"] == {}
    for step in range(1, 6):
        if step == 3:
            # Weights that an engine has packed elsewhere, and a checkpoint then set, are still the ones that are trained.
            for model in (head, whole):
                model.c.data = model.c.data + 0.1
        if step == 4:
            # A run that goes on: what the checkpoint holds is all there is to the optimiser.
            saved = [optimizer.state_dict()]
            dist.broadcast_object_list(saved)
            optimizer = build_optimizer(head, 0.1, 0.9, 0.95)
            optimizer.load_state_dict(saved[0])
        norm = advance(head, optimizer, step, [rank], max_norm, max_value)
        expected_norm = advance(whole, expected, step, range(world), max_norm, max_value)
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(
                head.get_parameter(name), parameter, rtol=1e-6, atol=1e-6, msg=f"{name}, step {step}"
            )
    state = optimizer.state_dict()
    if rank == 0:
        torch.testing.assert_close(state["state"], expected.state_dict()["state"], rtol=1e-5, atol=1e-6)
        assert [group["params"] for group in state["param_groups"]] == [[0, 1, 2], [3]]
        expected.load_state_dict(state)
    moments = sum(entry["exp_avg"].numel() for entry in optimizer.adamw.state.values())
    counts = [None] * world
    dist.all_gather_object(counts, moments)
    assert sum(counts) == sum(parameter.numel() for parameter in optimizer.parameters)
    assert max(counts) <= optimizer.part.numel() < 1.3 * sum(counts) / world + 64


@pytest.mark.parametrize(("world", "max_norm", "max_value"), [(2, 0.0, 0.0), (3, 1.0, 0.0), (16, 0.0, 0.5)])
def test_divided_adamw_is_torchs_on_the_summed_gradients(assert_on_ranks, world, max_norm, max_value):
    """16: more ranks than parts of 32 values, so that some have nothing to update."""
    assert_on_ranks(world, compare, max_norm, max_value)
