"""What a training makes of a head: all of it learns, and the engine accepts it; in whatever portions and precisions it is fed."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads import head as head_module
from headstart.heads.checkpoint import load_head
from headstart.tests.train.tiny_runs import (
    all_lines,
    approximately,
    assert_same_run,
    head_tensors,
    in_step,
    optimizer_state,
)
from headstart.tests.train.trainings import HEADS
from headstart.train.run import loop, optimization

# ---- one long training of every kind of head, on a target that counts ----


@dataclass(frozen=True)
class Kind:
    """A kind of head, and how it is trained."""

    family: str
    keys: dict
    acceptance_length: float  # it comes to more


BEHIND_B = ("candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection.weight")
BLOCKS = {"lr": 0.02, "max_steps": 36, "num_anchors": 40}
KINDS = {
    "medusa": Kind("medusa", {"num_layers": 2, "lr": 0.03, "max_steps": 20}, 1.7),
    "medusa, shared lm_head": Kind(
        "medusa", {"num_layers": 2, "lr": 0.03, "max_steps": 20, "shared_lm_head": True}, 1.7
    ),
    "mlp_speculator": Kind("mlp_speculator", {"lr": 0.02, "max_steps": 36, "tie_weights": False, "loss": "hard"}, 1.7),
    "mlp_speculator, tied": Kind("mlp_speculator", {"lr": 0.02, "max_steps": 36, "loss": "hard"}, 1.7),
    "eagle": Kind("eagle", {"lr": 0.02, "max_steps": 30, "token_weight": 1, "max_grad_value": 0}, 2.5),
    "eagle3": Kind("eagle3", {"lr": 0.02, "max_steps": 24, "draft_vocab_size": 0}, 2.5),
    # Of 48 words eight end every draft.
    "eagle3, draft vocabulary": Kind("eagle3", {"lr": 0.02, "max_steps": 24, "draft_vocab_size": 40}, 1.7),
    "block": Kind("block", BLOCKS | {"edge_rank": 0}, 1.5),
    "block, edge": Kind("block", BLOCKS | {"edge_rank": 16}, 1.8),
    "block, draft vocabulary": Kind("block", BLOCKS | {"edge_rank": 16, "draft_vocab_size": 40}, 1.4),
    "block, dflash2": Kind(
        "block",
        BLOCKS | {"edge_rank": 0, "selector_rank": 16, "conv_kernel_size": 2, "conv_group_size": 8},
        1.8,
    ),
    "eagle3, narrow": Kind("eagle3", {"lr": 0.02, "max_steps": 36, "draft_vocab_size": 0, "hidden_size": 16}, 2.5),
}


@dataclass
class Trained:
    """The folder of a training, and what its head was in the first step, before any weight moved."""

    folder: object
    before: dict = field(default_factory=dict)  # {name: parameter}
    gradients: dict = field(default_factory=dict)  # {name: gradient}
    buffers: dict = field(default_factory=dict)
    live: dict = field(default_factory=dict)  # the parameters themselves, as the training leaves them

    def look(self, head):
        self.live = dict(head.named_parameters())
        self.before = {name: parameter.detach().clone() for name, parameter in self.live.items()}
        self.gradients = {n: p.grad.clone() if p.grad is not None else None for n, p in self.live.items()}
        self.buffers = {name: buffer.clone() for name, buffer in head.named_buffers()}


@pytest.fixture(scope="module")
def trained(make_trainers, counting_target, tmp_path_factory):
    """trained(name of KINDS) -> Trained, made once."""
    made = {}

    def trained(name):
        if name not in made:
            kind, folder = KINDS[name], tmp_path_factory.mktemp("trained")
            keys = {"target": counting_target, "batch_rows": 4, "eval_prompts": 5, "eval_tokens": 12} | kind.keys
            made[name] = Trained(folder / "run")
            with in_step(1, made[name].look):
                make_trainers(folder)[kind.family].run(**keys)
        return made[name]

    return trained


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_gets_a_gradient_and_moves_but_the_targets_own(trained, counting_target, name):
    found = trained(name)
    frozen = {name for name in found.live if not found.live[name].requires_grad}
    shares = "block" in name or ("eagle" in name and "narrow" not in name)
    assert frozen - {"lm_head.weight"} == ({"embed_tokens.weight"} if shares else set())
    assert ("lm_head.weight" in frozen) == (name == "block, draft vocabulary")
    after = dict(load_head(found.folder).named_parameters())
    assert after.keys() - frozen == found.gradients.keys() - frozen
    for one, gradient in found.gradients.items():
        if one in frozen:
            assert gradient is None
            assert torch.equal(found.live[one], found.before[one])
        else:
            # What is multiplied by W2 of an edge or by B of a selector, which start at zero.
            behind_zeros = one in ("markov_head.markov_w1.weight", *BEHIND_B)
            assert gradient.abs().max() > 1e-6 or behind_zeros, one
            assert (after[one] - found.before[one]).abs().max() > 1e-3, one


@pytest.mark.parametrize("name", KINDS)
def test_every_step_learns(trained, name):
    first, *_, last = all_lines(trained(name).folder, "train")
    for k in range(2 if name == "eagle" else 3):
        assert last[f"head{k}_loss"] < min(0.5 * first[f"head{k}_loss"], first[f"head{k}_loss"] - 1)
        assert last[f"head{k}_top1"] > first[f"head{k}_top1"] + 0.3
        if name == "eagle":
            assert last[f"head{k}_feature_loss"] < 0.8 * first[f"head{k}_feature_loss"]


@pytest.mark.parametrize("name", KINDS)
def test_trained_head_is_accepted_by_the_engine(trained, name):
    folder = trained(name).folder
    (acceptance,) = all_lines(folder, "acceptance")
    saved = json.loads((folder / "acceptance.json").read_text())
    assert acceptance["source"] == saved["source"] == "engine"
    assert acceptance["acceptance_length"] == pytest.approx(1 + sum(acceptance["per_position"]))
    assert len(acceptance["per_position"]) == 3 == load_head(folder).num_speculative_tokens
    assert acceptance["acceptance_length"] > KINDS[name].acceptance_length
    assert saved["samples"][0]["prompt"].startswith("<|user|>")


@pytest.mark.parametrize("name", ["medusa", "medusa, shared lm_head"])
def test_medusas_blocks_and_lm_heads_are_each_heads_own(trained, counting_target, name):
    head = load_head(trained(name).folder)
    blocks = [block.linear for one in head.heads for block in one.blocks]
    assert len(blocks) == 6
    for i, block in enumerate(blocks):
        assert all((block.weight - other.weight).abs().max() > 1e-3 for other in blocks[:i])
    if "shared" in name:
        assert all(one.lm_head is None for one in head.heads)
    else:
        own = [one.lm_head.weight for one in head.heads]
        target = AutoModelForCausalLM.from_pretrained(counting_target).lm_head.weight
        assert all((weight - target).abs().max() > 1e-3 for weight in own)
        assert (own[1] - own[2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["mlp_speculator", "mlp_speculator, tied"])
def test_mlp_speculator_is_tied_as_the_recipe_says(trained, name):
    assert load_head(trained(name).folder).config.tie_weights == ("tied" in name)


@pytest.mark.parametrize("name", ["eagle3", "eagle3, draft vocabulary", "eagle3, narrow"])
def test_eagle3_reads_and_drafts_what_the_recipe_says(trained, counting_target, name):
    found = trained(name)
    head = load_head(found.folder)
    assert head.features == (0, 1, 2)
    assert head.config.hidden_size == (16 if "narrow" in name else 32)
    assert head.needs_embedding == ("narrow" not in name)
    if "vocabulary" not in name:
        assert head.t2d is None
        return
    assert bool(head.t2d[2])  # the stop token
    assert all(torch.equal(found.buffers[one], getattr(head, one)) for one in ("d2t", "t2d"))
    lm_head = AutoModelForCausalLM.from_pretrained(counting_target).lm_head.weight
    assert torch.equal(found.before["lm_head.weight"], lm_head[torch.arange(40) + head.d2t])


# ---- the same training in other portions, from other features, in other precisions ----

WHOLE = {"max_steps": 2, "batch_rows": 8}


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize(
    "portions", [{"batch_rows": 1, "accumulate": 8}, {"chunk_tokens": 7}], ids=["micro-steps", "chunks"]
)
def test_portions_do_not_change_the_training(trainers, finished, family, portions):
    """The rows differ in their numbers of labels, so a mean of means would be off by far more than the bounds."""
    one, other = finished(family, **WHOLE), trainers[family].run(**(WHOLE | portions))
    for a, b in zip(all_lines(one), all_lines(other), strict=True):
        assert a == approximately(b, 3e-6)
    torch.testing.assert_close(head_tensors(other), head_tensors(one), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", HEADS)
def test_cached_features_train_as_computed_ones(trainers, finished, capsys, family):
    one = finished(family, **WHOLE)
    assert "feature cache" not in capsys.readouterr().err
    other = trainers[family].run(**WHOLE, cache_features=True)
    for a, b in zip(all_lines(one), all_lines(other), strict=True):
        assert a == approximately(b, 1e-5)
    said = capsys.readouterr().err
    width = {"eagle3": 128, "block": 64}.get(family, 32)  # three streams, or one, beside the last state
    assert f"rows x 64 tokens x {width} values in float32 take" in said
    assert said.index("feature cache") < said.index("features:")
    assert not (other / "features").exists()


HALF = {"target_dtype": "bfloat16", "autocast": "bf16"}
SHARED, ENGINE = {"shared_lm_head": True}, {"eval_prompts": 2, "eval_tokens": 6}


@pytest.mark.parametrize(
    ("family", "keys", "precision"),
    [
        *((family, {}, HALF) for family in HEADS),
        ("medusa", ENGINE, HALF | {"autocast": "no"}),
        ("medusa", ENGINE | SHARED, HALF | {"autocast": "no"}),
        ("medusa", ENGINE | SHARED, HALF),
    ],
)
def test_bfloat16_target_and_autocast_train_nearly_as_in_fp32(trainers, finished, family, keys, precision):
    """And weights and optimiser are in fp32 all the same."""
    one, other = finished(family, **WHOLE, **keys), trainers[family].run(**WHOLE, **keys, **precision)
    for a, b in zip(all_lines(one, "train"), all_lines(other, "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
        assert a["loss"] != b["loss"]
    weights = head_tensors(other).values()
    assert {tensor.dtype for tensor in weights if tensor.is_floating_point()} == {torch.float32}
    state = optimizer_state(other)["state"]
    moments = [entry[name] for entry in state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * sum(parameter.requires_grad for parameter in load_head(other).parameters())
    assert {moment.dtype for moment in moments} == {torch.float32}


# ---- steps that are computed again in the backward pass ----


@pytest.mark.parametrize("family", ["eagle", "eagle3", "block"])
@pytest.mark.parametrize(
    ("keys", "longest", "checkpointed"),
    [
        ({"checkpoint_activations": "yes"}, 64, True),
        ({}, 63, True),
        ({}, 64, False),
        ({"checkpoint_activations": "no"}, 63, False),
    ],
)
def test_steps_computed_again_leave_the_same_run(
    trainers, finished, monkeypatch, tmp_path, family, keys, longest, checkpointed
):
    """Asked for, or because rows, here of 64 tokens, are long."""
    whole, used = finished(family, **WHOLE), []

    def checkpoint(step, *arguments, **how):
        used.append(step)
        return real(step, *arguments, **how)

    real = head_module.checkpoint
    monkeypatch.setattr(head_module, "checkpoint", checkpoint)
    monkeypatch.setattr(optimization, "LONG_ROW", longest)
    assert_same_run(whole, trainers[family].run(**WHOLE, **keys))
    assert bool(used) == checkpointed


# ---- what a step is fed ----


def test_each_micro_batch_was_announced_by_the_one_before_it(trainers, monkeypatch):
    """Over micro-batches, steps and epochs, and after the last one nothing: what is not announced is read while a GPU waits."""
    asked, announced = [], []

    class Watched(loop.RowReader):
        def read(self, index, following=None):
            asked.append(index.tolist())
            announced.append(None if following is None else following.tolist())
            return super().read(index, following)

    monkeypatch.setattr(loop, "RowReader", Watched)
    trainers["medusa"].run(batch_rows=2, accumulate=2, max_steps=7)
    assert len(asked) == 14
    assert announced == [*asked[1:], None]
