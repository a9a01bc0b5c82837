"""Ranks of a tensor-parallel group: what each holds of a decoder, and that together they compute the bits of one device."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.inference.engine.cache import _counts_of_rank_0
from headstart.inference.models.decoder import Decoder, ForwardPass, row_counts
from headstart.inference.models.division import WHOLE, Division, check_divides, in_pairs
from headstart.inference.models.transport import ALONE
from headstart.inference.models.weights import load_weights, random_weights, weight_bytes
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index
from headstart.kernels.linear.linear_table import launch_of_rows, num_splits
from headstart.kernels.shared_memory import H200
from headstart.tests.inference.forked_ranks import on_ranks
from headstart.tests.inference.models.small_checkpoints import SHAPE

BIASED = LlamaConfig(
    **SHAPE | dict(num_attention_heads=8, head_dim=6, intermediate_size=72), attention_bias=True, mlp_bias=True
)


@dataclass
class Place:
    """A rank that calls nobody."""

    rank: int
    size: int

    def check(self):
        pass


def llama_8b(**changes):
    shape = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    return LlamaConfig(**shape | dict(num_hidden_layers=1, vocab_size=128256) | changes)


def divisions(config, size, **how):
    return [Division(config, Place(rank, size), **how) for rank in range(size)]


def pieces(weights):
    """Every tensor of DecoderWeights, those of ranges one by one."""
    yield from (weights.embedding, weights.norm, weights.lm_head)
    for layer in weights.layers:
        yield from (layer.input_norm, layer.post_norm)
        for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
            yield from getattr(product, "weights", None) or (product.weight,)
            if product.bias is not None:
                yield product.bias


def test_two_ranks_take_the_ranges_of_one_gpu():
    config = llama_8b()
    assert num_splits(4096, 4096) == num_splits(4096, 14336) == 2
    ours = divisions(config, 2, device_type="cuda")
    assert [one.columns_of("layers.0.out.weight") for one in ours] == [[slice(0, 2048)], [slice(2048, 4096)]]
    assert [one.columns_of("layers.0.down.weight") for one in ours] == [[slice(0, 7168)], [slice(7168, 14336)]]
    assert all(one.keeps_bits and one.cut is None for one in ours)
    assert [(one.keeps_bits, one.cut) for one in divisions(config, 4, device_type="cuda")] == [(False, [4, 4])] * 4
    four = divisions(config, 2, device_type="cuda", invariant=4)
    assert four[1].columns_of("layers.0.out.weight") == [slice(2048, 3072), slice(3072, 4096)]
    assert all(one.keeps_bits and one.cut == [4, 4] for one in four)


def test_ranges_that_miss_the_heads_keep_bits_per_number_of_ranks():
    """Ranges end at multiples of 128: 1728 and 1472 features, where each of two ranks has 20 heads of 80."""
    config = llama_8b(hidden_size=3200, num_attention_heads=40, num_key_value_heads=40, head_dim=80)
    assert num_splits(3200, 3200) == 2
    ours = divisions(config, 2, device_type="cuda")
    assert [one.columns_of("layers.0.out.weight") for one in ours] == [[slice(0, 1600)], [slice(1600, 3200)]]
    assert not any(one.keeps_bits for one in ours)


def test_more_than_two_ranges_of_one_gpu_are_those_of_no_ranks():
    """It adds them from the first to the last; as a tree they would be other bits."""
    config = llama_8b(hidden_size=2048, intermediate_size=8192)
    assert num_splits(2048, 8192) == 4
    assert not any(one.keeps_bits for one in divisions(config, 2, device_type="cuda"))


def test_sums_are_added_as_a_tree_however_many_are_left():
    parts = torch.tensor([[2.0**24], [1.0], [1.0], [1.0]])
    assert in_pairs(parts, 1).tolist() == [[2.0**24 + 2]]
    assert in_pairs(parts, 2).tolist() == [[2.0**24], [2.0]]
    assert torch.equal(in_pairs(in_pairs(parts, 2), 1), in_pairs(parts, 1))
    assert len(in_pairs(parts[:3], 2)) == 3


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_read_their_parts_and_together_the_whole(size, tied, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**BIASED.to_diff_dict() | dict(tie_word_embeddings=tied))
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    parts = [load_weights(tmp_path, config, torch.float32, "cpu", division=one) for one in divisions(config, size)]
    whole = load_weights(tmp_path, config, torch.float32, "cpu")
    assert torch.equal(torch.cat([part.embedding for part in parts])[: config.vocab_size], whole.embedding)
    assert torch.equal(torch.cat([part.lm_head for part in parts])[: config.vocab_size], whole.lm_head)
    assert all((part.lm_head is part.embedding) == tied for part in parts)
    for i, layer in enumerate(whole.layers):
        ours = [part.layers[i] for part in parts]
        for name in ("out", "down"):
            held = [weight for one in ours for weight in getattr(one, name).weights]
            assert torch.equal(torch.cat(held, 1), getattr(layer, name).weight)
            biases = [getattr(one, name).bias for one in ours]
            assert torch.equal(biases[0], getattr(layer, name).bias)
            assert biases[1:] == [None] * (size - 1)
        q, k, v = layer.qkv.weight.split((48, 12, 12))
        heads, copies = 48 // size, max(size // 2, 1)
        for rank, one in enumerate(ours):
            key = rank // copies if size > 2 else rank
            expected = [q[rank * heads : (rank + 1) * heads], *(x[key * 6 : key * 6 + 6] for x in (k, v))]
            assert torch.equal(one.qkv.weight, torch.cat(expected))
        gates, ups = zip(*(one.gate_up.weight.chunk(2) for one in ours))
        assert torch.equal(torch.cat(gates + ups), layer.gate_up.weight)
    assert all(torch.equal(part.norm, whole.norm) for part in parts)


class Adding:
    """In the place of an Adapter: it adds to each weight a number of its own."""

    def check_fits(self, shapes):
        pass

    def add_to(self, name, piece, first):
        rows = torch.arange(first, first + len(piece), dtype=torch.float32)
        return piece + (rows if piece.dim() == 1 else rows[:, None] * 1000 + torch.arange(piece.shape[1]))


def test_an_adapter_is_added_to_the_parts_as_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("headstart.inference.models.weights.CHUNK_BYTES", 1000)  # several pieces of a tensor
    LlamaForCausalLM(BIASED).save_pretrained(tmp_path)
    given = dict(adapter=Adding())
    whole = load_weights(tmp_path, BIASED, torch.float32, "cpu", **given)
    parts = [
        load_weights(tmp_path, BIASED, torch.float32, "cpu", division=one, **given) for one in divisions(BIASED, 2)
    ]
    for name in ("out", "down"):
        held = [weight for part in parts for weight in getattr(part.layers[1], name).weights]
        assert torch.equal(torch.cat(held, 1), getattr(whole.layers[1], name).weight)
    gates, ups = zip(*(part.layers[0].gate_up.weight.chunk(2) for part in parts))
    assert torch.equal(torch.cat(gates + ups), whole.layers[0].gate_up.weight)
    assert torch.equal(torch.cat([part.lm_head for part in parts])[: BIASED.vocab_size], whole.lm_head)


def test_random_weights_are_those_of_one_device():
    whole = random_weights(BIASED, torch.float32, "cpu")
    parts = [random_weights(BIASED, torch.float32, "cpu", division=one) for one in divisions(BIASED, 4)]
    assert torch.equal(torch.cat([part.lm_head for part in parts])[: BIASED.vocab_size], whole.lm_head)
    held = [weight for part in parts for weight in part.layers[1].down.weights]
    assert torch.equal(torch.cat(held, 1), whole.layers[1].down.weight)
    assert torch.equal(parts[3].layers[1].qkv.weight[:12], whole.layers[1].qkv.weight[36:48])


def test_the_bytes_of_a_rank_are_known_before_it_loads():
    for one in divisions(BIASED, 4):
        weights = random_weights(BIASED, torch.float32, "cpu", division=one)
        held = sum(piece.nbytes for piece in pieces(weights))
        held += 4 * BIASED.hidden_size * 2 * 2 * (one.ranks.rank > 0)  # biases of o and down, which rank 0 alone keeps
        assert weight_bytes(BIASED, torch.float32, one) == held
    assert weight_bytes(BIASED, torch.bfloat16, WHOLE) == sum(
        piece.nbytes for piece in pieces(random_weights(BIASED, torch.bfloat16, "cpu"))
    )


def scores(ranks, invariant, dtype, whole=False, device_type="cpu"):
    """Hidden states and logits of seven first tokens, and the tables that heads take, as bytes."""
    division = WHOLE if whole else Division(BIASED, ranks, device_type, invariant)
    given = dict(dtype=dtype, device="cpu", max_positions=128, load_format="dummy", division=division)
    decoder = Decoder.from_pretrained(None, BIASED, **given)
    layers, heads, dim, _ = decoder.kv_shape
    tokens, pages = torch.arange(7) * 37 % BIASED.vocab_size, torch.arange(1, 8)
    zeros, node = torch.zeros_like(pages), torch.zeros(1, dtype=torch.int64)
    index = build_tree_index(pages[:, None], zeros, node, node[None], heads, dtype)
    kv = torch.zeros(layers, 2, 8 * heads * PAGE, dim, dtype=dtype)
    with torch.no_grad():
        hidden, _ = decoder.forward(ForwardPass(tokens, zeros, pages * PAGE, index), kv)
        found = (
            hidden,
            decoder.logits(hidden),
            decoder.products(hidden),
            decoder.whole_embedding(),
            decoder.whole_lm_head(),
        )
    return [x.to(torch.float64).numpy().tobytes() for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_give_the_bits_of_one_device_where_the_ranges_are_the_same(dtype):
    expected = scores(ALONE, 4, dtype)
    for size in (2, 4):
        assert on_ranks(size, scores, 4, dtype) == [expected] * size
    assert scores(ALONE, 2, dtype) == on_ranks(2, scores, 2, dtype)[1]


def test_ranks_are_near_one_device_where_the_ranges_are_not():
    first, second = on_ranks(2, scores, None, torch.float32)
    assert first == second
    whole = scores(ALONE, None, torch.float32, whole=True)
    assert first[0] != whole[0]
    for ours, theirs in zip(first, whole):
        assert np.allclose(np.frombuffer(ours), np.frombuffer(theirs), rtol=1e-5, atol=1e-5)


def counts_of(ranks):
    """What a rank runs at start-up where its products have one launch more than those of rank 0, or one less."""
    own = {0: [7, 30, 64], 1: [7, 64], 2: [7, 20, 30, 64]}[ranks.rank]
    return _counts_of_rank_0(own, ranks, 64)


def test_ranks_run_as_many_passes_at_start_up():
    assert on_ranks(3, counts_of) == [[7, 30, 64]] * 3


@pytest.mark.parametrize(
    ("size", "invariant", "told"),
    [
        (3, None, "tensor_parallel_size=3 does not divide the 12 query heads on 2 key heads.*1, 2, 4, 6, 12 would fit"),
        (5, None, "tensor_parallel_size=5 does not divide"),
        (4, 2, "tensor_parallel_invariant=2 cuts products into 2 ranges.*give one of 4"),
        (4, 8, "tensor_parallel_invariant=8 .*divide the 12 query heads.*give one of 4"),
        (6, 4, "multiple of tensor_parallel_size=6.*leave it out"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide_the_heads_are_refused(size, invariant, told):
    config = LlamaConfig(**SHAPE | dict(num_attention_heads=12, hidden_size=48))
    with pytest.raises(ValueError, match=told):
        check_divides(config, size, invariant)


def test_launches_of_shared_rows_are_run_at_start_up_too():
    def shares(rows):
        share = -(-rows // 256) * 128
        return [share, rows - share] if rows >= 512 else None

    def launches(rows):
        return tuple(count and launch_of_rows(4096, 7168, count, 132, H200, 1) for count in shares(rows) or ())

    counts = row_counts([(64, 64)], 1200, torch.device("cpu"), [(4096, 7168, shares)])
    assert {launches(rows) for rows in counts} == {launches(rows) for rows in range(1, 1201)}
    assert len(counts) < 40
