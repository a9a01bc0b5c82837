"""Drafts by weights of 8 bits: the target's tokens stay, drafts are those of the rounded weights and accepted about as often."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headstart.heads.checkpoint import save_head
from headstart.heads.eagle3 import Eagle3
from headstart.heads.medusa import Medusa
from headstart.heads.mlp_speculator import MLPSpeculator
from headstart.inference.llm import LLM
from headstart.inference.models.blocks import Float8Linear
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.lm_heads import Float8LMHead
from headstart.inference.speculation.proposers import HeadProposer
from headstart.inference.speculation.tree import chain
from headstart.kernels.linear.float8_linear import Float8Weight
from headstart.tests.inference.speculation.draft_cases import CASES
from headstart.tests.inference.speculation.draft_matrix import (
    build,
    draft,
    make_head,
    make_prompts,
    make_target,
    predict,
)
from headstart.tests.inference.speculation.small_drafters import DEPTH, DEVICES, llama, make, outputs

ASSETS = Path(__file__).resolve().parents[3] / "assets"
NAMES = (
    "medusa-blocks2-own_lm_head",
    "medusa-blocks1-shared_lm_head",
    "mlp-untied-scaled",
    "mlp-tied-plain",
    "eagle-biases",
    "eagle3-draft_vocabulary",
)


def rounded(weight):
    return Float8Weight.of(weight).widened(weight.dtype)


@torch.no_grad()
def round_head(head):
    """Round in place what a quantised drafter rounds."""
    if isinstance(head, Medusa):
        modules = [] if head.config.shared_lm_head else [one.lm_head for one in head.heads]
    elif isinstance(head, MLPSpeculator):
        modules = list({head.modules_of(depth)[-1] for depth in range(head.max_speculative_tokens)})
    else:
        layer = head.midlayer if isinstance(head, Eagle3) else head.layers[0]
        modules = [layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        modules += [head.lm_head] if isinstance(head, Eagle3) else []
    for module in modules:
        module.weight.copy_(rounded(module.weight))


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_rounded_weights(name, tree):
    """By training's own forward, on the CPU, whose sums are exact enough to tell rounded weights from others."""
    kind, changes = CASES[name]
    target = make_target("cpu", 2)
    plain, head = LLM(target.model, max_num_seqs=2), make_head(kind, target, **changes)
    original, taught = (deepcopy(head) for _ in range(2))
    for one in (original, taught):
        if head.needs_embedding:
            one.take_embedding(target.embedding)
    round_head(taught)
    llm = build(plain, head, tree, quantization="fp8", **({"num_speculative_tokens": 3} if tree == "dynamic" else {}))
    texts, roots = draft(llm, make_prompts((1, 9)))
    said, _ = predict(target, taught, texts, roots, rounded(target.lm_head.weight))
    others, _ = predict(target, original, texts, roots)
    apart = 0
    for root, scores, unrounded in zip(roots, said, others):
        assert root.kept.keys() == scores.keys()
        for path, expected in scores.items():
            drafted = expected > -torch.inf
            largest = expected[drafted].abs().max()
            assert (root.kept[path] - expected)[drafted].abs().max() <= 1e-5 * largest
            apart += (root.kept[path] - unrounded[path])[drafted].abs().max() > 1e-3 * largest
    assert apart > len(roots)  # the rounding shows


@pytest.fixture(scope="module", params=DEVICES)
def setting(request):
    """(target, {temperature: plain outputs}) on a device, in 16 bits on a GPU."""
    target = llama().to(request.param, torch.bfloat16 if request.param == "cuda" else torch.float32)
    plain = LLM(target, max_num_seqs=1)
    return target, {t: outputs(plain, t, logprobs=2) for t in (0.0, 0.8)}


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("name", ["medusa", "mlp-untied", "eagle", "eagle3"])
def test_the_target_s_tokens_and_logprobs_stay(setting, name, tree, tmp_path):
    """With heads from files, whose rounded weights are freed."""
    target, expected = setting
    head = make(name, target).to(target.dtype)
    save_head(head, tmp_path / "head")
    speculative = {
        "model": str(tmp_path / "head"),
        "tree": tree,
        "num_speculative_tokens": DEPTH,
        "quantization": "fp8",
    }
    llm = LLM(target, max_num_seqs=8, speculative_config=speculative)
    assert any(weight.numel() == 0 for weight in llm.engine.drafter.head.parameters())
    for temperature, plain in expected.items():
        assert outputs(llm, temperature, logprobs=2) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("name", ["medusa", "mlp-untied", "eagle", "eagle3"])
def test_on_a_gpu_products_are_of_8_bits_and_scores_those_of_the_rounded_weights(name, rows):
    target = llama(hidden_size=128, intermediate_size=160).to("cuda", torch.bfloat16)
    decoder = LLM(target, max_num_seqs=1).engine.decoder
    head = make(name, target).to("cuda", torch.bfloat16)
    other = deepcopy(head)
    for one in (head, other):
        if name.startswith("eagle"):
            one.take_embedding(target.model.embed_tokens.weight)
    round_head(other)

    def drafter(head, quantization):
        return HeadProposer(head, head, quantization=quantization).build(chain(DEPTH), "shared_noise", decoder, None)

    quantised, plain = drafter(head, "fp8"), drafter(other, None)
    x = torch.randn(rows, 128, device="cuda").bfloat16()

    def close(found, expected):
        found, expected = found.float(), expected.float()
        assert (found - expected).norm() <= 0.01 * expected.norm()

    if name == "medusa":
        assert all(isinstance(one, Float8LMHead) for one in quantised.lm_heads)
        close(quantised.logits(x, DEPTH), plain.logits(x, DEPTH))
        assert quantised.saved_bytes["first"] == DEPTH * (97 * 128 - 4 * 97)
    elif name == "mlp-untied":
        batch = SimpleNamespace(feature=x, root=torch.zeros(rows, dtype=torch.int64, device="cuda"))
        close(quantised.start(batch)[0], plain.start(batch)[0])
    else:
        assert isinstance(quantised.layer.mlp.gate_up, Float8Linear)
        for found, expected in zip(quantised.layer.after_heads(x, x), plain.layer.after_heads(x, x)):
            close(found.sum(0) if found.dim() == 3 else found, expected.sum(0) if expected.dim() == 3 else expected)
        if name == "eagle":  # its plain drafter multiplies by the target's lm_head, which nobody rounded
            close(quantised.logits(x), torch.nn.functional.linear(x, rounded(target.lm_head.weight)))
        else:
            close(quantised.logits(x), plain.logits(x))
        assert quantised.saved_bytes["level"] == quantised.saved_bytes["first"] + quantised.saved_bytes["advance"] > 0


def test_a_given_module_is_left_alone():
    head = make("eagle3", target := llama())
    before = deepcopy(head.state_dict())
    LLM(target, speculative_config={"model": head, "quantization": "fp8"})
    assert before.keys() == head.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_trained_heads_are_accepted_about_as_often():
    prompts = [f"def {name}(items):\n" for name in ("search", "merge", "flatten", "group_by", "rotate", "count")]
    params, found = SamplingParams(temperature=0.8, seed=1, max_tokens=96), {}
    for quantization in (None, "fp8"):
        speculative = {"model": ASSETS / "stdlib-coder-medusa", "quantization": quantization}
        llm = LLM(ASSETS / "stdlib-coder", max_num_seqs=6, speculative_config=speculative)
        answers = llm.generate(prompts, params)
        accepted = sum(one.outputs[0].spec_decode_metrics.num_accepted_tokens for one in answers)
        found[quantization] = [one.outputs[0].token_ids for one in answers], accepted
    (plain, accepted), (texts, with_8_bits) = found.values()
    assert texts == plain
    assert accepted > 30
    assert abs(with_8_bits - accepted) <= 0.2 * accepted


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (dict(quantization="awq"), "'quantization'.* must be 'fp8', .* or None, got 'awq'"),
        (dict(quantization="fp8", draft_tensor_parallel_size=2), "leave out draft_tensor_parallel_size=2"),
        (dict(quantization="fp8", method="ngram", model=None), "the method 'ngram' has none: leave it out"),
        (dict(quantization="fp8", model="target"), "the method 'draft_model' has none: leave it out"),
        (dict(quantization="fp8", model="block-edge"), "not there for heads of the method 'block': leave it out"),
    ],
)
def test_what_cannot_be_quantised_is_refused(speculative, message):
    target = llama()
    model = speculative.get("model", "medusa")
    if model is not None:
        speculative = speculative | {"model": make(model, target)}
    with pytest.raises(ValueError, match=message):
        LLM(target, speculative_config={"num_speculative_tokens": 2} | speculative)
