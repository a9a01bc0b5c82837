"""What the readers of other projects would compute from our files (other_readers.py) is what the head computes, wherever the model card
says that they take them; where it says no, they stop, or compute something else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from headstart.heads.checkpoint import save_head
from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.formats import FAMILIES, check_format, family_of
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export.readers import SGLANG, TGI, VLLM, files_as_written, judge
from headstart.tests.heads.test_eagle import SHAPE, H, V, one_document, randomize
from headstart.tests.hub_export import other_readers as rules

T, S, DEPTH, HT, VD, INNER = 6, 3, 8, 20, 11, 18
MEDUSA, EAGLE, FMS = "the original Medusa code (FasterDecoding)", "the original EAGLE code", "fms-extras"
PLAIN = SHAPE | dict(head_dim=4, base_model_name_or_path="some/target", num_speculative_tokens=S)  # heads x D is H
WIDE = PLAIN | dict(head_dim=10)
PUBLISHED = dict(target_hidden_size=H, draft_vocab_size=VD, aux_layer_ids=(2, 4, 5))

# family -> reader -> its rules; a reader that has none reads no head of the family.
RULES = {
    "Medusa": {MEDUSA: rules.original_medusa, TGI: rules.tgi, VLLM: rules.vllm_medusa},
    "MLP speculator": {FMS: rules.ibm_mlp_speculator, VLLM: rules.ibm_mlp_speculator, TGI: rules.tgi},
    "EAGLE": {VLLM: rules.vllm_eagle, SGLANG: rules.sglang_eagle, EAGLE: rules.original_eagle, TGI: rules.tgi},
    "EAGLE-3": {VLLM: rules.vllm_eagle3, SGLANG: rules.sglang_eagle3, EAGLE: rules.original_eagle3, TGI: rules.tgi}
    | {"the `speculators` library": rules.speculators_library},
}


def medusa(*shape):
    return lambda: Medusa(MedusaConfig(H, V, *shape, base_model_name_or_path="some/target"))


def mlp_speculator(**changes):
    return lambda: MLPSpeculator(MLPSpeculatorConfig(H, V, INNER, base_model_name_or_path="some/target", **changes))


def eagle(**changes):
    return lambda: Eagle(EagleConfig(**PLAIN | changes))


def eagle3(**changes):
    return lambda: Eagle3(Eagle3Config(**PLAIN | PUBLISHED | changes))


HEADS = {
    "five Medusa heads": medusa(5),
    "three Medusa heads": medusa(3),
    "Medusa heads of two blocks": medusa(5, 2),
    "Medusa heads that share the lm_head": medusa(3, 1, True),
    "two blocks and a shared lm_head": medusa(3, 2, True),
    "MLP speculator": mlp_speculator(tie_weights=False, scale_input=False),
    "tied MLP speculator": mlp_speculator(scale_input=False),
    "MLP speculator with scaled input": mlp_speculator(scale_input=True),
    "MLP speculator of one step": mlp_speculator(num_steps=1, tie_weights=False, scale_input=False),
    "tied MLP speculator of one step": mlp_speculator(num_steps=1, scale_input=False),
    "EAGLE": eagle(),
    "EAGLE with q, k, v biases": eagle(attention_bias=True),
    "EAGLE with fc.bias": eagle(fc_bias=True),
    "EAGLE with wide attention": eagle(head_dim=10),
    "EAGLE-3": eagle3(),
    "EAGLE-3 over the whole vocabulary": eagle3(draft_vocab_size=V),
    "EAGLE-3 of another width": eagle3(target_hidden_size=HT),
    "EAGLE-3 with norm_before_residual": eagle3(norm_before_residual=True),
    "EAGLE-3 with wide attention": eagle3(head_dim=10),
    "EAGLE-3 of other layers": eagle3(aux_layer_ids=(1, 3, 8)),
    "EAGLE-3 of two layers": eagle3(aux_layer_ids=(2, 5)),
    "EAGLE-3 with q, k, v biases": eagle3(attention_bias=True),
}
CASES = [(name, format) for name, make in HEADS.items() for format in FAMILIES[family_of(make())][1].FORMATS]


def built(name):
    """(a random head in fp64, a target that it fits, whose embedding EAGLE heads use)"""
    head = randomize(HEADS[name]())
    wide = head.config.target_hidden_size if isinstance(head, Eagle3) else H

    def draw(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)

    streams = [draw(T, wide).roll(layer) for layer in range(DEPTH + 1)]
    tokens = torch.randint(V, (T, S), generator=torch.Generator().manual_seed(7))
    target = rules.Target(draw(V, wide), draw(V, wide) / 4, streams, draw(T, wide) + 0.1, tokens)
    if isinstance(head, Eagle3) and head.d2t is not None:
        head.set_draft_vocabulary(*build_draft_vocabulary(torch.arange(V) % 7, VD))
    if isinstance(head, (Eagle, Eagle3)) and wide == H:
        head.take_embedding(target.embedding)
    return head, target


def written(head, target, format, folder):
    save_head(head, folder, format=format, torch_file=True, lm_head_weight=target.lm_head)
    return folder


def logits_of(head, target):
    """What the head itself computes, depth by depth [T, V]."""
    family, tokens = family_of(head), target.tokens
    if family == "Medusa":
        return head(target.final, target.lm_head)[0]
    if family == "MLP speculator":
        return head(target.final, tokens)[0]
    document = one_document(T)
    if family == "EAGLE":
        return [head(target.final[None], tokens[None, :, 0], *document)[0] @ target.lm_head.T]
    features = torch.cat([target.streams[id] for id in head.features], -1)
    ids, found = head.draft_token_ids, []
    for state in head(features[None], tokens[None], *document, S):
        logits = torch.full((T, V), rules.ABSENT, dtype=torch.float64)
        found.append(logits.index_copy(1, torch.arange(V) if ids is None else ids, head.logits(state)[0]))
    return found


@torch.no_grad()
def verdict(read, folder, head, target):
    """ "takes", or why not. Of EAGLE heads the rules compute the first depth only."""
    try:
        found = read(folder, target)
    except rules.Refused as error:
        return f"stops: {error}"
    if found is None:
        return "serves without speculation"
    expected = logits_of(head, target)
    if len(found) != len(expected):
        return f"drafts {len(found)} deep instead of {len(expected)}"
    off = max(float((one - two).abs().max()) for one, two in zip(found, expected))
    return "takes" if off < 1e-4 else f"computes something else, off by {off:.2g}"


@pytest.mark.parametrize(("name", "format"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_readers_take_what_the_card_says(tmp_path, name, format):
    head, target = built(name)
    try:
        check_format(head, format)
    except ValueError as error:
        assert "use '" in str(error) or "fc.bias" in str(error)  # another format is named
        return
    folder = written(head, target, format, tmp_path / "head")
    for said in judge(files_as_written(head, format, DEPTH)):
        read = RULES[family_of(head)].get(said.reader)
        found = verdict(read, folder, head, target) if read else "has no such heads"
        assert (found == "takes") is (said.loads and not said.problems), f"{said}, but by its rules: {found}"
