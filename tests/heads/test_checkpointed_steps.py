"""Steps that are computed again in the backward pass (Head.run_step) against steps that are kept."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config

# An 8B Llama's proportions: MLP 3.5 times as wide, four query heads per key head, a quarter of the vocabulary drafted.
H, V, B, T = 128, 512, 2, 48
SHAPE = {"hidden_size": H, "vocab_size": V, "intermediate_size": 448}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
AUX = {"target_hidden_size": H, "draft_vocab_size": 128, "aux_layer_ids": (2, 16, 29)}
BLOCK = {
    "num_hidden_layers": 7,
    "mask_token_id": 3,
    "aux_layer_ids": (2, 16, 29),
    "num_speculative_tokens": 3,
    "edge_rank": 8,
}
BLOCK |= {"sliding_layers": (0, 4), "sliding_window": 9}
HEADS = {
    "eagle": (lambda: Eagle(EagleConfig(**SHAPE)), 1, 3),
    "eagle3": (lambda: Eagle3(Eagle3Config(**SHAPE, **AUX)), 3, 7),
    "block": (lambda: BlockHead(BlockConfig(**SHAPE, **BLOCK)), 3, 3),
}
BOTH = pytest.mark.parametrize("family", HEADS)


def make(family, device="cpu"):
    """(head, arguments of predict): rows of two documents."""
    make_head, num_streams, num_steps = HEADS[family]
    torch.manual_seed(0)
    head = make_head().to(device)
    places = torch.arange(T, device=device).repeat(B, 1)
    features = torch.randn(B, T, num_streams * H, device=device)
    ids, lm_head = torch.randint(V, (B, T), device=device), torch.randn(V, H, device=device)
    return head, (features, ids, places, (places > 20).long(), lm_head, num_steps)


def train_once(head, arguments, autocast):
    """({name: gradient}, bytes that autograd saves per token) of one pass; every state counts with a weight of its own."""
    weights = {parameter.untyped_storage()._cdata for parameter in head.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    head.zero_grad()
    with torch.autocast(arguments[0].device.type, torch.bfloat16, enabled=autocast):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            states = head.predict(*arguments).states
        sum((i + 1) * state.float().logsumexp(-1).mean() for i, state in enumerate(states)).backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    return gradients, sum(saved.values()) / (B * T)


@BOTH
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_bit_by_bit_for_a_fraction_of_the_memory(family, autocast):
    head, arguments = make(family)
    kept, bytes_kept = train_once(head, arguments, autocast)
    head.checkpoint_steps = True
    again, bytes_again = train_once(head, arguments, autocast)
    print(
        f"{family}, autocast {autocast}: {bytes_kept:,.0f} bytes a token kept, {bytes_again:,.0f} with steps computed again"
    )
    assert kept.keys() == again.keys()
    assert len(kept) > 8
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    num_steps = arguments[-1]
    # A step's input, its keys and values, and once the features that enter fc. A block has four slots a token.
    of_steps = 7 * 4 * H + 15 * H if family == "block" else num_steps * (H + 2 * 32)
    assert bytes_again < (of_steps + 3 * H) * 4 + 200 * num_steps
    assert bytes_again < bytes_kept / 10


@BOTH
def test_a_pass_that_is_dropped_leaves_no_memory_behind(family):
    """Its graph must hold nothing that holds the graph: no collector sees such a ring."""
    head, arguments = make(family)
    head.checkpoint_steps = True
    head.predict(*arguments)  # makes what the head keeps, such as its rotary frequencies
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        head.predict(*arguments)
        gc.collect()
    changes = [event.nbytes() for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(changes) > 0
    assert sum(changes) == 0


@BOTH
def test_without_gradients_there_is_nothing_to_compute_again(family):
    head, arguments = make(family)
    with torch.no_grad():
        kept = head.predict(*arguments).states
        head.checkpoint_steps = True
        assert all(torch.equal(one, other) for one, other in zip(kept, head.predict(*arguments).states, strict=True))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_on_a_gpu_are_the_same_bit_by_bit(family, autocast):
    head, arguments = make(family, "cuda")
    kept, bytes_kept = train_once(head, arguments, autocast)
    head.checkpoint_steps = True
    again, bytes_again = train_once(head, arguments, autocast)
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert bytes_again < bytes_kept / 4
