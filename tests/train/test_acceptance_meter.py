"""Acceptance while a head trains is that of the head as it is at the moment."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.eagle import Eagle, EagleConfig
from headstart.tests.inference.conftest import make_tokenizer
from headstart.train.run.acceptance import AcceptanceMeter
from headstart.train.teacher.features import FrozenTarget


def test_keys_of_an_earlier_state_of_the_head_are_not_used_again():
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(
        **shape, vocab_size=len(tokenizer), initializer_range=0.3, bos_token_id=None, eos_token_id=None
    )
    target = LlamaForCausalLM(config).eval()
    head = Eagle(EagleConfig.for_target(config))
    head.take_embedding(target.model.embed_tokens.weight)
    conversations = [
        [{"role": "user", "content": f"{i} " * 70}, {"role": "assistant", "content": "so it is"}] for i in range(4)
    ]

    def meter():
        sizes = {"max_tokens": 40, "max_length": 256, "row_length": 128, "chunk_tokens": 64}
        return AcceptanceMeter(FrozenTarget(target), head, conversations, tokenizer=tokenizer, note=print, **sizes)

    def redraw():
        for parameter in (*head.fc.parameters(), *head.layers.parameters()):
            torch.nn.init.normal_(parameter, std=0.4)

    redraw()
    kept = meter()
    before = kept.measure()
    redraw()
    after, afresh = kept.measure(), meter().measure()
    assert before["rates"] != after["rates"]
    assert after == afresh
