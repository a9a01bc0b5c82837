"""Modules that are not what their config says: adapters, hooks, replaced forwards, ties and classes of the user's own."""

import threading

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart import LLM, SamplingParams
from headstart.inference.models.architectures import UnsupportedArchitecture
from headstart.inference.models.modules.deferred import Deferred
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.inference.models.modules.module_outline import outline_of
from headstart.inference.speculation.tree import build_static_tree
from headstart.tests.inference.models.modules.test_module_fusion import one_pass
from headstart.tests.inference.models.small_architectures import small_model

PROMPTS = [[7, 3, 90, 12, 55], [1, 2], list(range(20, 60))]
TREE = build_static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.4, 0.2]], 12)
OPTIONS = dict(max_model_len=200, max_num_seqs=3)
NEW = 8


def attention_of(model, layer):
    return (model.model.decoder if model.config.model_type == "opt" else model.model).layers[layer].self_attn


def add_lora(model):
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)


def tie_layers(model):
    attention_of(model, 1).q_proj.weight = attention_of(model, 0).q_proj.weight


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2 + self.bias


def use_subclass(model):
    for layer in (0, 1):
        attention_of(model, layer).k_proj.__class__ = Doubled


def change_by_hook(model):
    shift = torch.linspace(-1, 1, 48)
    attention_of(model, 0).q_proj.register_forward_hook(lambda part, args, output: output * 1.5 + shift)


def look_by_hook(model):
    seen = model.seen = []

    def look(part, args, output):
        seen.append((args[0].cpu().double(), output.cpu().double()))

    attention_of(model, 1).q_proj.register_forward_hook(look)


def steer_by_hook(model):
    """The residual stream gets a sum that could be fused with the next norm."""
    weight = torch.eye(48)

    def steer(part, args, output):
        found = output if torch.is_tensor(output) else output[0]
        found = found + F.linear(found, weight)
        return found if torch.is_tensor(output) else (found, *output[1:])

    attention_of(model, 0).register_forward_hook(steer)


def steer_before(model):
    attention_of(model, 1).q_proj.register_forward_pre_hook(lambda part, args: (args[0] + args[0],))


def replace_forward(model):
    part = attention_of(model, 0).q_proj
    own, shift = part.forward, torch.linspace(-1, 1, 48)
    part.forward = lambda x: own(x) + shift


CHANGES = [
    add_lora,
    tie_layers,
    use_subclass,
    change_by_hook,
    look_by_hook,
    steer_by_hook,
    steer_before,
    replace_forward,
]


@pytest.mark.parametrize("model_type", ["opt", "starcoder2"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_tokens_are_those_of_the_changed_module_and_speculation_changes_no_bit(change, model_type, speculate):
    model = small_model(model_type)
    plain_tokens = generate(model)
    change(model)
    expected = generate(model)
    assert (expected == plain_tokens) == (change is look_by_hook)
    llm = LLM(model, **OPTIONS)
    assert isinstance(llm.engine.decoder, ModuleDecoder)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)] == expected
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=NEW, ignore_eos=True, logprobs=2) for i in range(3)]
    alone = [outputs(llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, params)]
    assert outputs(llm, PROMPTS, params) == alone
    drafting = speculate(llm, TREE, [tokens for tokens, _ in alone], PROMPTS, options=OPTIONS)
    assert outputs(drafting, PROMPTS, params) == alone
    assert drafting.get_stats()["acceptance_length"] > 1.2
    assert generate(model) == expected, "the module is what it was"


def generate(model):
    """The library's own greedy tokens."""
    options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def outputs(llm, prompts, params):
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)]


def test_a_hook_sees_the_rows_of_passes_and_none_of_the_trial():
    model = small_model("opt")
    look_by_hook(model)
    decoder = ModuleDecoder(model, 100)
    assert model.seen == []
    one_pass(decoder)
    ((x, found),) = model.seen
    part = attention_of(model, 1).q_proj
    torch.testing.assert_close(found, F.linear(x, part.weight.double(), part.bias.double()), rtol=1e-5, atol=1e-5)
    assert not isinstance(found, Deferred)
    assert len(part._forward_hooks) == 1
    assert not part._forward_pre_hooks


def test_hooks_that_come_later_and_only_look_are_followed():
    model = small_model("starcoder2")
    decoder = ModuleDecoder(model, 100)
    expected = one_pass(decoder)
    look_by_hook(model)
    assert torch.equal(one_pass(decoder), expected)
    assert len(model.seen) == 1


class Outputs(TorchDispatchMode):
    """All tensors that operations made, but for views."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if not any(one.alias_info for one in function._schema.returns):
            self.found += [one for one in tree_leaves(found) if torch.is_tensor(one)]
        return found


@pytest.mark.parametrize("model_type", ["opt", "gemma3_text", "phi3"])
def test_an_outline_has_no_weights_and_all_else(model_type):
    model = small_model(model_type)
    ModuleDecoder(model, 100)  # which packs its weights
    model.half().lm_head.float()
    part = model.get_submodule(model.base_model_prefix)
    part.lock, part.table, part.extra = (
        threading.Lock(),
        torch.ones(50, 50),
        {"more": [nn.Parameter(torch.ones(60, 60))]},
    )
    with Outputs() as made:
        outline = outline_of(model)
    assert made.found
    assert {one.device.type for one in made.found} == {"meta"}
    for kind in ("named_parameters", "named_buffers"):
        own = dict(getattr(model, kind)(remove_duplicate=False))
        found = dict(getattr(outline, kind)(remove_duplicate=False))
        assert {name: (one.shape, one.dtype, one.stride(), type(one)) for name, one in own.items()} == {
            name: (one.shape, one.dtype, one.stride(), type(one)) for name, one in found.items()
        }
        assert {one.device.type for one in found.values()} <= {"meta"}
        assert len(set(map(id, own.values()))) == len(set(map(id, found.values()))), "ties"
    assert [name for name, _ in outline.named_modules()] == [name for name, _ in model.named_modules()]
    assert not {id(one) for one in outline.modules()} & {id(one) for one in model.modules()}
    copied = outline.get_submodule(model.base_model_prefix)
    assert copied.lock is part.lock
    assert copied.table.is_meta
    assert copied.extra["more"][0].is_meta
    assert outline.config is not model.config
    assert outline.config is copied.config


def test_a_forward_that_cannot_be_tried_is_refused_before_long_work():
    model = small_model("opt")
    part = attention_of(model, 0).q_proj
    own = part.forward
    part.forward = lambda x: own(x) * x.max().item()
    with pytest.raises(UnsupportedArchitecture):
        ModuleDecoder(model, 100)


def test_nothing_is_fused_across_a_part_with_hooks():
    """So a pass fuses what the trial fused, whatever the hooks do."""
    model = small_model("starcoder2")
    plain = ModuleDecoder(model, 100)
    change_by_hook(model)
    found = ModuleDecoder(model, 100)
    assert plain._fused["heads"] == 2
    assert found._fused["heads"] == 1
