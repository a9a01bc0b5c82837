"""Packed rows hold every document whole and once, and keep documents apart."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.train.data.packed.packing import block_attention_mask, pack


def documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(1, 50, (n,), generator=generator).tolist(), [i % 2 == 1 for i in range(n)]) for n in lengths]


LENGTHS = [7, 40, 13, 1, 0, 33, 20, 5, 19, 64, 2, 31, 17, 29]


def test_every_document_lies_whole_in_one_row_with_positions_from_zero():
    encoded = documents(LENGTHS)
    rows = pack(encoded, 37, pad_token_id=99)
    found = []
    for row in range(len(rows.input_ids)):
        ids = rows.document_ids[row]
        for document in ids[ids >= 0].unique_consecutive().tolist():
            here = ids == document
            found.append(document)
            assert rows.input_ids[row][here].tolist() == encoded[document][0][:37]
            assert rows.supervised[row][here].tolist() == encoded[document][1][:37]
            assert rows.position_ids[row][here].tolist() == list(range(int(here.sum())))
    assert sorted(found) == [i for i, n in enumerate(LENGTHS) if n]
    padding = rows.document_ids == -1
    assert (rows.input_ids[padding] == 99).all()
    assert not rows.supervised[padding].any()
    assert not rows.position_ids[padding].any()
    assert rows.num_cut == sum(n > 37 for n in LENGTHS)
    assert rows.input_ids.dtype == rows.position_ids.dtype == rows.document_ids.dtype == torch.int64


def test_packing_wastes_little_and_repeats_itself():
    lengths = torch.randint(20, 500, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    encoded = documents(lengths)
    rows, again = pack(encoded, 1024), pack(encoded, 1024)
    assert (rows.document_ids < 0).float().mean() < 0.02
    assert torch.equal(rows.document_ids, again.document_ids)
    assert torch.equal(rows.input_ids, again.input_ids)


def test_impossible_packing_is_refused():
    with pytest.raises(ValueError, match="length 1 is too short"):
        pack(documents([3]), 1)
    with pytest.raises(ValueError, match="nothing to pack"):
        pack(documents([0]), 8)


def test_mask_is_causal_inside_documents_and_padding_sees_itself():
    mask = block_attention_mask(torch.tensor([[4, 4, 9, 9, 9, -1, -1]]))
    assert mask.shape == (1, 1, 7, 7)
    expected = torch.eye(7, dtype=torch.bool)
    expected[1, 0] = expected[3, 2] = expected[4, 2] = expected[4, 3] = True
    assert torch.equal(mask[0, 0], expected)


def test_packed_logits_equal_those_of_each_document_alone():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # sharp attention, so that a wrong mask shows
        parameter.data.mul_(8 if parameter.ndim == 2 else 1)
    encoded = documents(LENGTHS)
    rows = pack(encoded, 64)
    mask = block_attention_mask(rows.document_ids)
    with torch.no_grad():
        packed = model(rows.input_ids, attention_mask=mask, position_ids=rows.position_ids).logits
        causal = torch.ones(64, 64, dtype=torch.bool).tril().expand_as(mask)
        leaky = model(rows.input_ids, attention_mask=causal, position_ids=rows.position_ids).logits
        assert packed.isfinite().all()
        leaks = 0.0
        for document, (ids, _) in enumerate(encoded):
            if ids:
                alone = model(torch.tensor([ids])).logits[0]
                here = rows.document_ids == document
                torch.testing.assert_close(packed[here], alone, atol=1e-5, rtol=1e-5)
                leaks = max(leaks, (leaky[here] - alone).abs().max().item())
    assert leaks > 0.1  # the comparison above would have noticed a mask that lets documents see each other
