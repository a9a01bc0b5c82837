"""The estimated memory against that which steps take: the profiler's count of what torch allocates on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.train.data.packed.packing import PackedRows
from headstart.train.estimate import memory
from headstart.train.estimate.memory import MemoryEstimate, check_estimate, estimate_memory, saved_bytes
from headstart.train.loss.blocks import BlockObjective, accumulate_block_gradients, draw_blocks
from headstart.train.loss.distillation import Objective, accumulate_gradients, find_labels
from headstart.train.loss.losses import Loss
from headstart.train.run.optimization import build_optimizer, update

H, V = 64, 3000
ROWS, TOKENS, CHUNK = 2, 256, 64
SHAPE = {"hidden_size": H, "vocab_size": V, "intermediate_size": 160}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
AUX = {"target_hidden_size": H, "draft_vocab_size": 500, "aux_layer_ids": (0, 1, 2)}
HEADS = {
    "medusa": (lambda: Medusa(MedusaConfig(H, V, 3)), 3),
    "medusa, shared lm_head": (lambda: Medusa(MedusaConfig(H, V, 3, 1, True)), 3),
    "mlp_speculator": (lambda: MLPSpeculator(MLPSpeculatorConfig(H, V, 96)), 3),
    "eagle": (lambda: Eagle(EagleConfig(**SHAPE)), 1),
    "eagle, unrolled": (lambda: Eagle(EagleConfig(**SHAPE)), 3),
    "eagle3": (lambda: Eagle3(Eagle3Config(**SHAPE, **AUX)), 5),
    "eagle, checkpointed": (lambda: Eagle(EagleConfig(**SHAPE)), 3),
    "eagle3, checkpointed": (lambda: Eagle3(Eagle3Config(**SHAPE, **AUX)), 5),
}
PRECISIONS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, True)}


def make_target(dtype):
    """What the estimate and the loss ask of a FrozenTarget, without a decoder."""
    model = nn.Module()
    model.embed, model.lm_head = nn.Embedding(V, H, dtype=dtype), nn.Linear(H, V, bias=False, dtype=dtype)
    model.requires_grad_(False)

    def split(features, layers):
        return features[..., :H].flatten(0, 1), features[..., H:] if layers else features

    sizes = {"hidden_size": H, "vocab_size": V, "dtype": dtype}
    return SimpleNamespace(model=model, lm_head=model.lm_head, split=split, **sizes)


def allocated_at_most(work):
    """The most bytes that torch held on the CPU while work() ran, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = torch.tensor([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())])
    return int(held.cumsum(0).max())


@pytest.fixture(
    params=[(name, precision) for name in HEADS for precision in PRECISIONS], ids=lambda one: ", ".join(one)
)
def training(request):
    """(head, target, depths, optimiser, autocast)"""
    name, precision = request.param
    torch.manual_seed(0)
    (make, num_depths), (dtype, autocast) = HEADS[name], PRECISIONS[precision]
    head, target = make(), make_target(dtype)
    head.initialize_from_target(target.lm_head.weight, target.model.embed.weight)
    head.checkpoint_steps = "checkpointed" in name
    optimizer = build_optimizer(head, 0.1, 0.9, 0.95)
    return head, target, num_depths, optimizer, torch.autocast("cpu", torch.bfloat16, enabled=autocast)


DFLASH2 = dict(selector_rank=32, conv_kernel_size=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("every", [3, 16])
@pytest.mark.parametrize(
    ("parts", "checkpointed"),
    [({}, False), (dict(edge_rank=32), False), (dict(edge_rank=32), True), (DFLASH2, False)],
    ids=["dflash", "dspark", "dspark, computed again", "dflash2"],
)
def test_estimate_of_blocks_is_near_the_measured_peak(precision, every, parts, checkpointed):
    """A block after one of `every` tokens."""
    torch.manual_seed(0)
    dtype, autocast = PRECISIONS[precision]
    layers = {"num_hidden_layers": 2, "mask_token_id": 1, "aux_layer_ids": (0, 1, 2), "num_speculative_tokens": 7}
    head, target = BlockHead(BlockConfig(**SHAPE, **layers, **parts)), make_target(dtype)
    head.checkpoint_steps = checkpointed
    head.initialize_from_target(target.lm_head.weight, target.model.embed.weight)
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    sizes = {"batch_rows": ROWS, "row_length": TOKENS, "chunk_tokens": CHUNK, "num_depths": 7, "every": every}
    estimate = estimate_memory(head, target, build_optimizer(head, 0.1, 0.9, 0.95), **sizes, autocast=context)
    ids, places = torch.randint(0, V, (ROWS, TOKENS)), torch.arange(TOKENS).repeat(ROWS, 1)
    rows = PackedRows(ids, places, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    blocks = draw_blocks(rows, TOKENS // every, 7, seed=0, step=0)
    objective = BlockObjective(Loss("kl"), [1.0] * 7, selector_weight=float("selector_rank" in parts))

    def step():
        features = torch.randn(ROWS, TOKENS, 4 * H, dtype=dtype)
        last, read = target.split(features, head.aux_layers)
        kept = {"lm_head": target.lm_head, "objective": objective, "chunk_tokens": CHUNK}
        with context:
            states = head(read, *blocks.seen(ids), places, rows.document_ids)[:, :, 1:]
            accumulate_block_gradients(head, states, blocks, ids, last, num_labels=99, **kept)

    measured = allocated_at_most(step)
    assert 0.8 < (estimate.to_come - estimate.moments) / measured < 1.4


def test_estimate_is_near_the_measured_peak(training):
    """Gradients, activations and logits together: at least 0.8 and at most 1.4 times what the step takes."""
    head, target, num_depths, optimizer, autocast = training
    sizes = {"batch_rows": ROWS, "row_length": TOKENS, "chunk_tokens": CHUNK, "num_depths": num_depths}
    estimate = estimate_memory(head, target, optimizer, **sizes, autocast=autocast)
    assert all(parameter.grad is None for parameter in head.parameters())
    ids, places = torch.randint(0, V, (ROWS, TOKENS)), torch.arange(TOKENS).repeat(ROWS, 1)
    documents = torch.zeros_like(ids)
    labels = find_labels(ids, documents, documents == 0, num_depths)
    objective = Objective(Loss("kl"), [1.0] * num_depths)

    def step():
        features = torch.randn(ROWS, TOKENS, (1 + len(head.aux_layers)) * H, dtype=target.dtype)
        last, read = target.split(features, head.aux_layers)
        with autocast:
            predictions = head.predict(read, ids, places, documents, target.lm_head.weight, num_depths)
            kept = {"lm_head": target.lm_head, "objective": objective, "num_labels": 99, "chunk_tokens": CHUNK}
            accumulate_gradients(predictions, last, labels, **kept)

    measured = allocated_at_most(step)
    assert 0.8 < (estimate.to_come - estimate.moments) / measured < 1.4
    # And the state that the optimiser makes in its first step, apart from the buffers of that step.
    update(head, optimizer, lr=0.1, max_norm=0)
    state = [value.nbytes for entry in optimizer.state.values() for name, value in entry.items() if name != "step"]
    assert estimate.moments == sum(state)
    trained = sum(parameter.nbytes for parameter in head.parameters() if parameter.requires_grad)
    assert (estimate.gradients, estimate.head, estimate.target) == (trained, trained, 2 * V * H * target.dtype.itemsize)


def ranks_divide_the_state(rank, world):
    """On one rank: it makes a part of the moments, and has room for all gradients already."""
    torch.manual_seed(0)
    head, target = Medusa(MedusaConfig(H, V, 3)), make_target(torch.float32)
    size = sum(parameter.nbytes for parameter in head.parameters())
    optimizer = build_optimizer(head, 0.1, 0.9, 0.95)
    sizes = {"batch_rows": 1, "row_length": 32, "chunk_tokens": 8, "num_depths": 3}
    found = estimate_memory(head, target, optimizer, **sizes, autocast=torch.autocast("cpu", enabled=False))
    assert found.moments == pytest.approx(2 * size / world, rel=0.01)
    assert found.gradients == pytest.approx(size, rel=0.01)
    assert found.to_come == found.moments + found.activations + found.logits


def test_ranks_divide_the_optimisers_state(assert_on_ranks):
    assert_on_ranks(2, ranks_divide_the_state)


def test_long_rows_are_found_from_short_ones(training):
    """On the CPU exactly, apart from autocast's copies of weights: what autograd saves is a polynomial of the length."""
    head, target, num_depths, optimizer, autocast = training
    sizes = {"batch_rows": 1, "row_length": 200, "chunk_tokens": 8, "num_depths": num_depths}
    estimate = estimate_memory(head, target, optimizer, **sizes, autocast=autocast)
    with autocast:
        kept, share = saved_bytes(head, target, row_length=200, num_depths=num_depths), 0.5
        if head.checkpoint_steps:
            head.checkpoint_steps, share = False, 1.5
        sizes = [
            saved_bytes(head, target, row_length=200, num_depths=count) if count else 0
            for count in (num_depths, num_depths - 1)
        ]
    last = sizes[0] - sizes[1]
    assert estimate.activations == pytest.approx(kept + share * last, rel=1e-3, abs=estimate.head / 2)


def test_what_cannot_fit_is_told_before_the_first_step(monkeypatch):
    estimate = MemoryEstimate(
        target=90, head=10, gradients=10, moments=20, activations=50, logits=20, per_token=1, to_come=100
    )
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100)
    assert check_estimate(estimate, cpu) is None
    monkeypatch.setattr(memory, "free_bytes", lambda device: 99)
    assert "may run out of memory: lower batch_rows" in check_estimate(estimate, cpu)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 29)
    with pytest.raises(ValueError, match=r"gradients and the optimiser's state alone take .*: train on more GPUs"):
        check_estimate(estimate, cpu)


def test_run_that_cannot_fit_leaves_no_folder(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)
    with pytest.raises(ValueError, match="train on more GPUs"):
        trainer.main(max_steps=1)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    trainer.run(max_steps=1)
    assert capsys.readouterr().err.count("[medusa] memory: about 0.0 GiB: target") == 2
