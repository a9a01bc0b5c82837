"""A small random target with a byte-level tokenizer, saved to a folder, and random Medusa heads for it."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.engine.engine import Engine
from headstart.inference.llm import LLM
from headstart.inference.speculation.drafters.oracle import OracleDrafter
from headstart.inference.speculation.speculation import Speculation

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_head(target_folder, num_heads=3, shared_lm_head=False, **changes):
    config = LlamaConfig.from_pretrained(target_folder)
    shape = dict(hidden_size=config.hidden_size, vocab_size=config.vocab_size) | changes
    head = Medusa(MedusaConfig(num_heads=num_heads, shared_lm_head=shared_lm_head, **shape))
    torch.manual_seed(num_heads)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.fixture(scope="session")
def head_folder(target_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "medusa"
    save_head(make_head(target_folder), folder)
    return folder


@pytest.fixture(scope="session")
def make_target_head(target_folder):
    """make_head for the session's target."""
    return lambda **changes: make_head(target_folder, **changes)


@pytest.fixture(scope="session")
def random_target():
    """A random Llama of two layers and 97 tokens without an EOS; its near-ties make equality a strict test."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def speculate():
    """speculate(target, tree, known, prompts, rate, llm options, **engine options): an LLM whose drafter knows the outputs.

    Request i must have the seed i; it drafts known[i], each token wrongly with probability 1 - rate.
    """

    def make(target, tree, known, prompts, rate=0.5, options=None, **of_engine):
        llm = LLM(target, **(options or {}))
        decoder = llm.engine.decoder
        drafter = OracleDrafter(known, [len(p) for p in prompts], rate, decoder.vocab_size, decoder.device)
        given = replace(llm.engine.options, **of_engine)
        llm.session.engine = Engine.build(decoder, llm.eos_token_ids, given, Speculation(drafter, tree))
        return llm

    return make


@pytest.fixture
def raising(monkeypatch):
    """raising(owner, name, place): a context in which owner.name, called for the place-th time, does its work and raises."""

    @contextmanager
    def raising(owner, name, place):
        work, calls = getattr(owner, name), []

        def fail(*given, **named):
            result = work(*given, **named)
            calls.append(1)
            if len(calls) == place:
                raise MemoryError("none left")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            yield

    return raising


@pytest.fixture(scope="module")
def llm(target_folder):
    return LLM(str(target_folder), dtype="float32", device="cpu")
