"""The speculators library reads our files and computes what the head does; we read what it writes. Skipped where it is missing."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.hub_export.readers.readers import files_as_written, judge
from headstart.tests.heads.test_eagle import SHAPE, H, V, one_document, randomize

eagle3 = pytest.importorskip("speculators.models.eagle3")

T, S, DEPTH, VD = 6, 3, 8, 11
REFUSALS = r"mismatch|local file missing"  # the shape of fc; the weights of a target that is not named
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HEADS = {
    "plain": {},
    "norm_before_residual": dict(norm_before_residual=True),
    "whole vocabulary": dict(draft_vocab_size=V),
    "two layers": dict(aux_layer_ids=(1, 7)),
    "scaled rope": dict(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 16}),
    "no named target": dict(base_model_name_or_path=""),
    "q, k, v biases": dict(attention_bias=True),
    "another width": dict(target_hidden_size=20),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a tiny Llama, whose embedding the library takes and whose depth it asks for."""
    sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=8, num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=DEPTH, pad_token_id=None)).save_pretrained(folder)
    return folder


def made(target, **changes):
    shape = SHAPE | dict(target_hidden_size=H, draft_vocab_size=VD, aux_layer_ids=(2, 4, 5))
    head = Eagle3(Eagle3Config(**shape | {"base_model_name_or_path": str(target)} | changes))
    if head.d2t is not None:
        head.set_draft_vocabulary(*build_draft_vocabulary(torch.arange(V) % 7, VD))
    return randomize(head).float()


def read_by_library(folder):
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return eagle3.Eagle3DraftModel.from_pretrained(folder, config=config).eval()


@torch.no_grad()
def worst_difference(model, head):
    """Over all steps of the unrolled forward, the library's positions being one more than ours."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, T, head.fc.in_features, generator=generator)
    tokens = torch.randint(V, (1, T), generator=generator)
    found = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: found.append(logits))
    model(features, tokens, torch.zeros(1, T, dtype=torch.int64), ttt_steps=S)
    hook.remove()
    shifted = [torch.cat((tokens[:, step:], tokens.new_zeros(1, step)), 1) for step in range(S)]
    states = head(features, torch.stack(shifted, -1), *one_document(T), S)
    return max(float((one - head.logits(state)).abs().max()) for one, state in zip(found, states, strict=True))


@pytest.mark.parametrize("name", HEADS)
def test_the_library_computes_what_the_head_does(tmp_path, target, name):
    head = made(target, **HEADS[name])
    save_head(head, tmp_path / "head", format="speculators")
    (said,) = (one for one in judge(files_as_written(head, "speculators", DEPTH)) if "library" in one.reader)
    if not said.loads:
        with pytest.raises((RuntimeError, OSError), match=REFUSALS):
            read_by_library(tmp_path / "head")
        return
    difference = worst_difference(read_by_library(tmp_path / "head"), head)
    assert difference > 0.1 if said.problems else difference < 1e-4


def test_what_the_library_writes_is_read(tmp_path, target):
    head = made(target, norm_before_residual=True)
    save_head(head, tmp_path / "ours", format="speculators")
    model = read_by_library(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_head(tmp_path / "theirs")
    assert loaded.config == head.config
    assert worst_difference(model, loaded) < 1e-4
