"""What the replay reads of a target is what a head is trained on: these streams, at these rows, with these tokens after them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export.replay.replay import CONTEXT
from headstart.hub_export.replay.target_features import read_target_inputs

PROMPTS = [list(range(3, 51)), [7, 8], list(range(90, 80, -1))]  # longer than CONTEXT, too short, shorter


@pytest.fixture(scope="module")
def target(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["final", "streams"])
def test_features_rows_and_tokens_of_a_target(target, tiny_target, tmp_path, kind):
    if kind == "final":
        head = Medusa(MedusaConfig(32, 320, 2, 1, True))
    else:
        head = Eagle3(Eagle3Config.for_target(target.config, aux_layer_ids=(0, 1, 2), num_speculative_tokens=2))
    inputs, bits = read_target_inputs(head, tiny_target, tmp_path, PROMPTS, "cpu")
    assert bits == 32
    depths, row, counted = inputs.tokens.shape[-1], 0, []
    for number, ids in enumerate((PROMPTS[0], PROMPTS[2])):
        states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        for place in range(max(0, len(ids) - depths - CONTEXT), len(ids) - depths):
            found = inputs.features[0, row]
            assert inputs.tokens[0, row].tolist() == ids[place + 1 : place + 1 + depths]
            assert (int(inputs.positions[0, row]), int(inputs.documents[0, row])) == (place, number)
            if kind == "streams":
                *found, behind = found.split(32)
                assert all(torch.allclose(one, state[0, place], atol=1e-5) for one, state in zip(found, states))
                found = target.model.norm(behind)  # transformers gives the last one normed
            assert torch.allclose(found, states[-1][0, place], atol=1e-5)
            row += 1
        counted += [row - 2, row - 1]
    assert row == inputs.features.shape[1]
    assert inputs.rows.tolist() == counted
    assert (inputs.lm_head is None) is (kind == "streams")
