"""Heads' own lm_heads on ranks: whole or divided, the drafts are the same tokens."""

import pytest
import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.inference.llm import LLM
from headstart.inference.models import divided_weight
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.lm_heads import DividedLMHead
from headstart.tests.inference.ranks.test_ranks import prompts
from headstart.tests.inference.speculation.small_drafters import VOCAB, llama, make

pytestmark = pytest.mark.filterwarnings("ignore:with tensor_parallel_size")


def head_of(method):
    """A small head with lm_heads of its own."""
    target = llama()
    if method != "block":
        return make(method, target)
    torch.manual_seed(7)
    shape = dict(
        num_hidden_layers=2, mask_token_id=5, num_speculative_tokens=4, aux_layer_ids=(1, 3), draft_vocab_size=40
    )
    head = BlockHead(BlockConfig.for_target(target.config, **shape))
    for parameter in head.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    chosen = torch.randperm(VOCAB)[:40].sort().values
    head.set_draft_vocabulary(chosen - torch.arange(40), torch.isin(torch.arange(VOCAB), chosen))
    head.take_embedding(target.model.embed_tokens.weight)
    return head


def lm_heads_of(drafter):
    found = getattr(drafter, "lm_heads", None) or [drafter.lm_head]
    return list(found.values()) if isinstance(found, dict) else found


def outputs_of(llm):
    """The outputs of greedy and sampled requests."""
    params = [
        SamplingParams(max_tokens=8, temperature=0.9 * (i % 2), seed=i, logprobs=1) for i in range(len(prompts()))
    ]
    outputs = [one.outputs[0] for one in llm.generate(prompts(), params)]
    return [(one.token_ids, one.logprobs) for one in outputs]


def drafted(llm):
    """(Candidates of every depth, outputs) of these requests."""
    with llm.engine.recording() as recorded:
        outputs = outputs_of(llm)
        candidates = [(place, found) for _, place, found in recorded]
    return candidates, outputs


@pytest.mark.parametrize(
    ("method", "size", "tree"),
    [("medusa", 2, "chain"), ("eagle3", 2, "dynamic"), ("mlp", 4, "dynamic"), ("block", 2, "chain")],
)
def test_drafts_are_the_same_however_lm_heads_are_placed(method, size, tree, divided_folder, forked_llm, monkeypatch):
    spec, found = dict(model=head_of(method), tree=tree), []
    ways = [(1, 0, False), (size, 2**25, True)]
    if method == "medusa":  # by the size of the lm_heads, too
        ways += [(None, 2**25, False), (None, 0, True)]
    for asked, bound, is_divided in ways:
        monkeypatch.setattr(divided_weight, "SMALL", bound)
        config = spec | dict(draft_tensor_parallel_size=asked)
        llm = forked_llm(divided_folder, size, speculative_config=config)
        placed = {isinstance(one, DividedLMHead) for one in lm_heads_of(llm.engine.drafter)}
        assert placed == {is_divided}
        found.append(drafted(llm))
    assert found[1:] == found[:1] * (len(ways) - 1)
    assert len(found[0][0]) > len(prompts())


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_rounded_lm_heads_are_whole_on_each_rank(method, divided_folder, forked_llm):
    expected = outputs_of(forked_llm(divided_folder, 2))
    llm = forked_llm(divided_folder, 2, speculative_config=dict(model=head_of(method), quantization="fp8"))
    placed = {type(one).__name__ for one in lm_heads_of(llm.engine.drafter)}
    assert placed == {"NoneType" if method == "eagle" else "WholeLMHead"}  # EAGLE's is the target's, which is divided
    assert outputs_of(llm) == expected


@pytest.mark.parametrize(
    ("asked", "method", "told"),
    [
        (3, "eagle3", "draft_tensor_parallel_size=3: .* among all 2 ranks .* give 2, 1, or leave it out"),
        (2, "draft_model", "every rank holds a draft model whole: leave it out"),
        (0, "eagle3", "must be a whole number of at least 1, got 0"),
    ],
)
def test_what_lm_heads_cannot_be_divided_by_is_refused(asked, method, told, divided_folder):
    model = str(divided_folder) if method == "draft_model" else make(method, llama())
    spec = dict(model=model, num_speculative_tokens=2, draft_tensor_parallel_size=asked)
    with pytest.raises(ValueError, match=told):
        LLM(divided_folder, device="cpu", tensor_parallel_size=2, speculative_config=spec)
