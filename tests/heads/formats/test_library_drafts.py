"""Our files in the speculators library, and its files here: the logits that it computed from ours (library_drafts.py) are ours."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headstart.heads.block_config import BlockConfig
from headstart.heads.families import from_file
from headstart.tests.heads.formats.library_drafts import BLOCK, HEADS, SHAPE

RECORD = Path(__file__).parent / "recorded" / "speculators-0.9.0.safetensors"


@pytest.fixture(scope="module")
def record():
    """({name: tensor}, {head: config.json}) that the library wrote."""
    with safe_open(RECORD, "pt") as file:
        configs = {name: json.loads(text) for name, text in file.metadata().items() if name in HEADS}
    return load_file(RECORD), configs


def read(record, name):
    """The head of a file that the library wrote, with the target's tables."""
    tensors, configs = record
    start = f"{name}/file/"
    of_file = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
    kind, reading = from_file(of_file, configs[name])
    head = kind(reading.config)
    if head.d2t is not None:
        head.set_draft_vocabulary(reading.state["d2t"], reading.state["t2d"])
    missing, unexpected = head.load_state_dict(reading.state, strict=False)
    assert (unexpected, missing) == ([], ["embed_tokens.weight"])  # the library leaves the target's tables out
    head.take_embedding(tensors[f"{name}/ours/embed_tokens.weight"])
    return head, reading


@pytest.mark.parametrize("name", HEADS)
def test_what_the_library_writes_is_the_head_that_we_wrote(record, name):
    _, reading = read(record, name)
    shape = dict(num_speculative_tokens=BLOCK - 1, base_model_name_or_path="drafts/target")
    assert reading.config == BlockConfig(**SHAPE | shape | HEADS[name])
    assert (reading.format, reading.notes) == ("speculators", [])


def drafted(tensors, name, head):
    """(states of all slots that predict [M, H], the tokens before them [M], their logits [R, K, V])"""
    ids, anchors, before = tensors["given/input_ids"], tensors[f"{name}/anchors"], tensors[f"{name}/before"]
    places = tensors["given/position_ids"], tensors["given/document_ids"]
    states = head(tensors["given/features"], ids[:, anchors], anchors[None] - 1, *places)[0]  # [R, S, H]
    first = head.config.first_slot
    given = states[:, first:].flatten(0, 1), before[:, first:].flatten()
    logits = head.logits(*given, tensors[f"{name}/ours/lm_head.weight"])
    return *given, logits.view(len(anchors), -1, logits.shape[1])


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_logits_and_confidence_are_the_library_s(record, name):
    tensors, (head, _) = record[0], read(record, name)
    anchors, first = tensors[f"{name}/anchors"], head.config.first_slot
    *given, logits = drafted(tensors, name, head)
    expected = tensors[f"{name}/logits"][:, first:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert len(anchors) > 8
    assert expected.std() > 0.5
    assert (f"{name}/confidence" in tensors) == head.config.confidence
    if head.config.confidence:
        found = head.confidence_logits(*given).view(len(anchors), -1)
        torch.testing.assert_close(found, tensors[f"{name}/confidence"][:, first:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in HEADS if "sliding" in name])
@pytest.mark.parametrize("other", ["window_of_block", "sliding_is_causal", "sliding_window"])
@torch.no_grad()
def test_another_reading_of_sliding_layers_gives_other_logits(record, name, other):
    tensors, (head, _) = record[0], read(record, name)
    said = getattr(head.config, other)
    head.config = replace(head.config, **{other: said + 1 if other == "sliding_window" else not said})
    expected = tensors[f"{name}/logits"][:, head.config.first_slot :]
    assert (drafted(tensors, name, head)[-1] - expected).abs().max() > 0.01
