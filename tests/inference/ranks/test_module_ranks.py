"""Ranks of models that run as their own modules: the bits of one process, for any number of ranks, with and without drafts."""

import pytest

from headstart.benchmarks import random_heads
from headstart.inference.models import divided_weight
from headstart.inference.sampling_params import SamplingParams
from headstart.tests.inference.models.small_architectures import small_config, small_model

HOW = dict(max_model_len=200, max_num_seqs=3)
PROMPTS = [[7, 3, 90, 12, 55], [1, 2], list(range(20, 90)), [5] * 9]


@pytest.fixture(autouse=True)
def divides_all(monkeypatch):
    """Small weights are divided, too."""
    monkeypatch.setattr(divided_weight, "SMALL", 0)


@pytest.fixture
def folder(tmp_path):
    def saved(model_type):
        small_model(model_type).save_pretrained(tmp_path / model_type)
        return tmp_path / model_type

    return saved


def outputs(llm):
    given = dict(temperature=0.9, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found = llm.generate(PROMPTS, [SamplingParams(seed=i, **given) for i in range(len(PROMPTS))])
    return [(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]


def drafting(method, model_type, one):
    if method is None:
        return None
    if method == "ngram":
        return dict(method="ngram", num_speculative_tokens=3, adaptive=True)
    if method == "draft_model":  # of another architecture, which every rank holds whole
        return dict(model=small_config("phi3"), num_speculative_tokens=3)
    head = random_heads.random_head(method, small_config(model_type), one.engine.decoder, 3)
    return dict(model=head, tree="dynamic" if method == "eagle3" else "chain")


@pytest.mark.parametrize(
    ("model_type", "size", "method"),
    [
        ("gpt2", 3, "ngram"),  # weights [K, N], a tied lm_head; the ranks divide nothing evenly
        ("opt", 4, "eagle3"),  # q, k and v in a product, biases, a tied lm_head
        ("phi3", 2, None),  # gate and up in a weight
        ("gemma3_text", 2, "eagle"),  # norms of other formulas, gates of another activation, a tied lm_head
        ("mixtral", 4, "medusa"),  # experts that are stored one by one
        ("gpt_oss", 2, "draft_model"),  # experts with biases, [K, N], whose gates and ups alternate; sinks
    ],
)
def test_ranks_give_the_bits_of_one_process(model_type, size, method, folder, forked_llm, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 60)
    path = folder(model_type)
    one = forked_llm(path, 1, **HOW)
    llm = forked_llm(path, size, speculative_config=drafting(method, model_type, one), **HOW)
    assert outputs(llm) == outputs(one)
    assert llm.get_stats()["num_draft_tokens"] > 0 or method is None
    whole, part = one.engine.decoder, llm.engine.decoder
    assert part.weight_bytes < 0.8 * whole.weight_bytes
    assert part.lm_head.shape[0] < whole.vocab_size == part.vocab_size


@pytest.mark.parametrize("model_type", ["mixtral", "gpt2"])
def test_random_weights_and_small_ones_are_those_of_one_process(model_type, forked_llm, monkeypatch):
    """Where the bound divides some weights and leaves others whole."""
    monkeypatch.setattr(divided_weight, "SMALL", 48 * 48 * 4)
    config = small_config(model_type, tie_word_embeddings=False)
    one, llm = (forked_llm(config, size, load_format="dummy", **HOW) for size in (1, 2))
    assert outputs(llm) == outputs(one)
