"""Acceptance while a head trains is that of the head as it is at the moment."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.eagle import Eagle, EagleConfig
from headstart.tests.inference.conftest import make_tokenizer
from headstart.train.run import acceptance
from headstart.train.run.acceptance import AcceptanceMeter
from headstart.train.teacher.features import FrozenTarget


@pytest.fixture
def build_meter():
    """build_meter(**more) on a tiny target; its head is `.head`, what it notes `.notes`"""
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

    def build():
        sizes = {"max_tokens": 40, "max_length": 256, "row_length": 128, "chunk_tokens": 64}
        return AcceptanceMeter(
            FrozenTarget(target),
            head,
            conversations,
            source="target",
            tokenizer=tokenizer,
            note=build.notes.append,
            **sizes,
        )

    build.head, build.notes = head, []
    return build


def test_keys_of_an_earlier_state_of_the_head_are_not_used_again(build_meter):
    def redraw():
        for parameter in (*build_meter.head.fc.parameters(), *build_meter.head.layers.parameters()):
            torch.nn.init.normal_(parameter, std=0.4)

    redraw()
    kept = build_meter()
    before = kept.measure()
    redraw()
    after, afresh = kept.measure(), build_meter().measure()
    assert before["rates"] != after["rates"]
    assert after == afresh


def test_a_divided_target_that_the_engine_cannot_run_is_measured_teacher_forced(build_meter, monkeypatch):
    class Engine:
        fails_at_once = True

        def __init__(self, source, target):
            assert source == "target"
            if self.fails_at_once:
                raise ValueError("too few heads")

        def run(self, *given, **arguments):
            raise ValueError("no memory")

    monkeypatch.setattr(acceptance, "DividedEngine", Engine)
    monkeypatch.setattr(FrozenTarget, "is_sharded", True)
    for Engine.fails_at_once, told in ((True, ": too few heads"), (False, "this time.*: no memory")):
        measured = build_meter().measure()
        assert (measured["source"], measured["samples"]) == ("teacher_forced", [])
        assert re.search(f"teacher-forced .*{told}", build_meter.notes.pop())
        assert not build_meter.notes
