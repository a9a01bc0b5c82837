"""FlexAttention, used for training on a GPU, gets the same documents, scale and groups as the CPU's attention."""

import copy

import pytest
import torch

from headstart.heads import packed_attention
from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.packed_attention import PackedAttention

B, T, HQ, HK, D = 2, 150, 6, 2, 16  # no multiple of FlexAttention's blocks


def documents():
    ids = torch.zeros(B, T, dtype=torch.int64)
    ids[0, 70:] = 1
    ids[1, 130:] = -1
    return ids


def rows(heads, seed):
    return torch.randn(B, heads, T, D, generator=torch.Generator().manual_seed(seed))


def test_flex_attention_gets_what_the_dense_one_gets(monkeypatch):
    """Uncompiled, as it runs on the CPU, without a backward pass."""
    monkeypatch.setattr(packed_attention, "_compiled", lambda function: function)
    q, k, v = rows(HQ, 0), rows(HK, 1), rows(HK, 2)
    masks = packed_attention.block_mask(documents()), packed_attention._dense_mask(documents())
    out, normaliser = packed_attention._attend_flex(q, k, v, masks[0], with_normaliser=True)
    expected, expected_normaliser = packed_attention._attend_dense(q, k, v, masks[1], with_normaliser=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(normaliser, expected_normaliser, rtol=0, atol=1e-5)
    alone, _ = packed_attention._attend_dense(q, k, v, masks[1], with_normaliser=False)
    torch.testing.assert_close(expected, alone, rtol=0, atol=1e-5)
    open_mask = packed_attention._dense_mask(torch.zeros_like(documents()))
    assert (packed_attention._attend_dense(q, k, v, open_mask, True)[0] - out).abs().max() > 1e-2


@pytest.mark.parametrize("reach", [(False,), (True,), (False, 7), (True, 7), (True, 30, True), (False, 6, True)])
def test_flex_attention_of_blocks_gets_what_the_dense_one_gets(monkeypatch, reach):
    reach = packed_attention.Reach(*reach)
    size, places = 5, torch.tensor([[0, 3, 69, 70, 149], [2, 2, 90, 129, 0]])  # of the last feature that a block sees
    mask = packed_attention.blocks_mask(places, documents(), size, reach)
    assert mask.dtype == torch.bool
    monkeypatch.setattr(packed_attention, "_compiled", lambda function: function)
    monkeypatch.setattr(packed_attention, "_takes_flex", lambda tensor: True)
    flex = packed_attention.blocks_mask(places, documents(), size, reach)
    q = rows(HQ, 0)[:, :, : 5 * size]
    k, v = (torch.cat((rows(HK, seed), rows(HK, seed + 1)[:, :, : 5 * size]), 2) for seed in (1, 3))
    expected, _ = packed_attention._attend_dense(q, k, v, mask, with_normaliser=False)
    torch.testing.assert_close(packed_attention.attend(q, k, v, flex), expected, rtol=0, atol=1e-5)
    wrong = packed_attention._dense_mask(torch.zeros_like(documents()))[:, :, : 5 * size]
    assert (packed_attention._attend_dense(q, k[:, :, :T], v[:, :, :T], wrong, False)[0] - expected).abs().max() > 1e-2


def test_later_calls_add_a_rows_own_keys_only():
    """Compared with one softmax over all keys that a row sees, with the mask [T, 3 T] that the two parts avoid."""
    steps = [(rows(HQ, 3 * i), rows(HK, 3 * i + 1), rows(HK, 3 * i + 2)) for i in range(3)]
    attention = PackedAttention(documents())
    found = [attention.attend(*step) for step in steps][-1]
    k, v = (torch.cat([step[part] for step in steps], 2).repeat_interleave(HQ // HK, 1) for part in (1, 2))
    own = torch.eye(T, dtype=torch.bool).expand(B, 1, T, T)
    mask = torch.cat([packed_attention._dense_mask(documents()), own, own], -1)
    scores = (steps[-1][0] @ k.transpose(-1, -2) / D**0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(found, scores.softmax(-1) @ v, rtol=0, atol=1e-5)


def head_and_inputs(head_dim=D):
    torch.manual_seed(0)
    sizes = dict(hidden_size=48, vocab_size=64, intermediate_size=96, target_hidden_size=32, draft_vocab_size=32)
    heads = dict(num_attention_heads=HQ, num_key_value_heads=HK, head_dim=head_dim, aux_layer_ids=(1, 2))
    positions = torch.arange(T).repeat(B, 1)
    positions[0, 70:] -= 70
    inputs = (torch.randn(B, T, 64), torch.randint(64, (B, T, 4)), positions, documents())
    return Eagle3(Eagle3Config(**sizes, **heads)), inputs


@pytest.mark.gpu
@pytest.mark.parametrize("num_steps", [1, 4])
def test_training_on_a_gpu_is_training_on_the_cpu(num_steps):
    head, inputs = head_and_inputs()
    other = copy.deepcopy(head).cuda()
    for one, device in ((head, "cpu"), (other, "cuda")):
        states = one(*(part.to(device) for part in inputs), num_steps)
        one.logits(torch.stack(states)).logsumexp(-1).mean().backward()
    for (name, ours), theirs in zip(head.named_parameters(), other.parameters()):
        scale = ours.grad.abs().max().item()
        torch.testing.assert_close(theirs.grad.cpu(), ours.grad, rtol=0, atol=1e-3 * scale + 1e-7, msg=name)


@pytest.mark.gpu
def test_what_flex_attention_does_not_take_is_refused():
    head, inputs = head_and_inputs(head_dim=8)
    with pytest.raises(ValueError, match=r"head dimensions from 16; got torch\.float32 and 8"):
        head.cuda()(*(part.cuda() for part in inputs), 1)
    head, inputs = head_and_inputs()
    with pytest.raises(ValueError, match=r"got torch\.float64 and 16"):
        head.double().cuda()(*(part.cuda() for part in inputs), 1)


def test_a_hidden_score_far_above_the_visible_ones_leaves_finite_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        q[..., 0], k[..., 4, 0] = 30.0, 60.0  # the last key scores 450 with every query: exp(450) is beyond fp32
    attention = PackedAttention(torch.zeros(1, 5, dtype=torch.int64))
    outputs = [attention.attend(q, k, v) for _ in range(2)]
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(is_causal=True),
        dict(sliding_layers=(0,), sliding_window=17, sliding_is_causal=True),
        dict(sliding_layers=(0, 1), sliding_window=40, window_of_block=True),
    ],
)
def test_training_blocks_on_a_gpu_is_training_them_on_the_cpu(changes, again):
    """again: layers are computed again in the backward pass."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=48, vocab_size=64, intermediate_size=96, num_hidden_layers=2, mask_token_id=3)
    heads = dict(num_attention_heads=HQ, num_key_value_heads=HK, head_dim=D, aux_layer_ids=(1, 2))
    head = BlockHead(BlockConfig(**sizes, **heads, **changes, num_speculative_tokens=4))
    head.checkpoint_steps = again
    other, (_, inputs) = copy.deepcopy(head).cuda(), head_and_inputs()
    places = torch.tensor([[0, 3, 69, 70, 149], [2, 2, 90, 129, 0]])  # of the last feature that a block sees
    given = torch.randn(B, T, 96), torch.randint(64, (B, 5)), places, *inputs[2:]
    for one, device in ((head, "cpu"), (other, "cuda")):
        one(*(part.to(device) for part in given)).exp().mean().backward()
    for (name, ours), theirs in zip(head.named_parameters(), other.parameters()):
        if ours.requires_grad:
            scale = ours.grad.abs().max().item()
            torch.testing.assert_close(theirs.grad.cpu(), ours.grad, rtol=0, atol=1e-3 * scale + 1e-7, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_training_under_autocast_on_a_gpu_is_near_that_in_fp32(kind):
    """fp32 weights and bf16 products: norms, rotations and attention get and give bf16 rows."""
    head, inputs = head_and_inputs()
    if kind == "block":
        sizes = dict(hidden_size=48, vocab_size=64, intermediate_size=96, num_hidden_layers=2, mask_token_id=3)
        heads = dict(num_attention_heads=HQ, num_key_value_heads=HK, head_dim=D, aux_layer_ids=(1, 2))
        head = BlockHead(BlockConfig(**sizes, **heads, num_speculative_tokens=4))
        places = torch.tensor([[0, 3, 69, 70, 149], [2, 2, 90, 129, 0]])
        inputs = torch.randn(B, T, 96), torch.randint(64, (B, 5)), places, *inputs[2:]
    else:
        inputs = *inputs, 4
    other = copy.deepcopy(head).cuda()
    for one, device, autocast in ((head, "cpu", False), (other, "cuda", True)):
        given = (part.to(device) if isinstance(part, torch.Tensor) else part for part in inputs)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            found = one(*given)
            states = found if kind == "block" else one.norm(torch.stack(found))
        assert states.dtype == (torch.bfloat16 if autocast else torch.float32)
        (states.float() * torch.linspace(-1, 1, states.shape[-1], device=device)).square().mean().backward()
    for (name, ours), theirs in zip(head.named_parameters(), other.named_parameters(), strict=True):
        if ours.grad is not None:
            difference = (theirs[1].grad.cpu() - ours.grad).norm() / ours.grad.norm()
            assert difference < 0.05, f"{name}: {difference:.3f}"
