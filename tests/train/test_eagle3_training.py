"""The EAGLE-3 training script on a tiny target: what it computes, and that every key does something."""

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import headstart.heads.eagle3 as head_module
from headstart.heads.checkpoint import load_head
from headstart.heads.eagle3 import Eagle3
from headstart.tests.heads.eagle_reference import eagle3_logits, eagle3_states
from headstart.tests.train.conftest import all_lines, assert_rates_are_those_of_their_step
from headstart.train import eagle3
from headstart.train.data import rows
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.packing import pack
from headstart.train.loss import distillation
from headstart.train.run import loop
from headstart.train.run.checkpointing import list_checkpoints


def run(arguments, **keys):
    assert eagle3.main(arguments(**keys)) == 0


def head_tensors(folder):
    return load_file(Path(folder) / "head" / "model.safetensors")


@pytest.fixture
def few(conversations, tmp_path):
    """A .jsonl of half a dozen conversations."""
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(Path(conversations).read_text().splitlines()[:6]))
    return str(path)


@pytest.fixture
def sharp(monkeypatch):
    """New heads attend to some rows far more than to others, so that positions matter."""

    def build(config):
        head = Eagle3(config)
        for projection in (head.midlayer.self_attn.q_proj, head.midlayer.self_attn.k_proj):
            projection.weight.data.mul_(5)
        return head

    monkeypatch.setattr(eagle3, "Eagle3", build)


def by_definition(target, data, folder, name, shift=0):
    """Per step: the sum of its losses, its labels, and those that count; one document and one position at a time.

    shift: how far the labels are off (0: as they should be).
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).double(), AutoTokenizer.from_pretrained(target)
    model.requires_grad_(False)
    head, w = load_head(folder), {key: one.double() for key, one in head_tensors(folder).items()}
    w["embed_tokens.weight"] = model.get_input_embeddings().weight
    drafted = list(range(48)) if head.d2t is None else [i + int(w["d2t"][i]) for i in range(len(w["d2t"]))]
    sums, alphas, labels, counts = [0.0] * 3, [0.0] * 3, [0] * 3, [0] * 3
    for ids, marks in encode_conversations(tokenizer, load_conversations(data)):
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        streams, distribution = torch.cat(out.hidden_states[:2], -1)[0], out.logits[0].softmax(-1)
        tokens = torch.tensor([[ids[min(t + 1 + i, len(ids) - 1)] for i in range(3)] for t in range(len(ids))])
        for i, states in enumerate(eagle3_states(w, head.config, streams, tokens, 3)):
            log_q = eagle3_logits(w, head.config, states).log_softmax(-1)
            for t in range(len(ids) - 2 - i):
                y = t + 2 + i
                if not marks[y]:
                    continue
                labels[i] += 1
                label = y + shift if y + shift < len(ids) else y
                p, q = (
                    distribution[label - 1][drafted],
                    log_q[t].exp(),
                )  # of all the distribution, not of the slice alone
                kl, alpha = (p * (p.log() - log_q[t])).sum(), torch.minimum(p, q).sum()
                values = {"kl": kl, "lk": kl}
                alphas[i] += float(alpha)
                if name == "hard":
                    if ids[label] not in drafted:
                        continue
                    values["hard"] = -log_q[t, drafted.index(ids[label])]
                sums[i] += float(values[name])
                counts[i] += 1
    if name == "lk":  # of the second step, which knows the first one's rates of acceptance
        weights = [math.exp(-2 * alpha / count) for alpha, count in zip(alphas, counts)]
        sums = [w * kl + (1 - w) * (count - alpha) for w, kl, count, alpha in zip(weights, sums, counts, alphas)]
    return sums, labels, counts


@pytest.mark.parametrize(("name", "size"), [("kl", 20), ("kl", 0), ("hard", 20), ("lk", 20)])
def test_losses_are_those_of_the_formulae_on_unpacked_conversations(
    eagle3_arguments, read_metrics, word_target, few, tmp_path, sharp, name, size
):
    """Packing, masks, streams, alignment of tokens and distributions, positions, draft vocabulary, weights and the divisor at
    once.
    """
    keys = {"loss": name, "draft_vocab_size": size, "step_decay": 0.6, "aux_layers": "0,1", "data": few, "lk_eta": 2}
    run(eagle3_arguments, row_length=256, batch_rows=1, lr=0, max_steps=2, **keys)  # all of them are one row
    *_, line = read_metrics()
    given = (word_target, few, tmp_path / "run", name)
    sums, labels, counts = by_definition(*given)
    for i in range(3):
        assert line[f"head{i}_loss"] == pytest.approx(sums[i] / counts[i], rel=2e-5)
    assert line["loss"] == pytest.approx(sum(0.6**i * sums[i] for i in range(3)) / labels[0], rel=2e-5)
    assert (counts[0] < labels[0]) == (name == "hard")
    shifted, *_ = by_definition(*given, shift=1)
    assert all(abs(shifted[i] / sums[i] - 1) > 1e-4 for i in range(3))  # what the bounds above would catch


@pytest.mark.parametrize("mutant", ["tokens early", "tokens late", "labels", "distribution", "positions", "streams"])
def test_anything_off_by_one_changes_the_loss(eagle3_arguments, read_metrics, tmp_path, monkeypatch, sharp, mutant):
    keys = {"max_steps": 1, "batch_rows": 8, "loss": "hard" if mutant == "labels" else "kl"}
    run(eagle3_arguments, **keys)
    if mutant.startswith("tokens"):
        true, step = head_module.next_tokens, 1 if mutant == "tokens early" else -1
        monkeypatch.setattr(head_module, "next_tokens", lambda ids, n: true(ids, n).roll(step, 1))
    elif mutant == "labels":
        find = loop.find_labels
        monkeypatch.setattr(loop, "find_labels", lambda ids, *rest: find(ids.roll(-1, 1), *rest))
    elif mutant == "distribution":
        distribution = distillation.target_distribution
        monkeypatch.setattr(
            distillation, "target_distribution", lambda logits, *rest: distribution(logits.roll(1, 0), *rest)
        )
    else:
        predict = Eagle3.predict

        def wrong(head, streams, ids, positions, *rest, **named):
            if mutant == "streams":
                return predict(head, streams.roll(1, 1), ids, positions, *rest, **named)
            return predict(head, streams, ids, 2 * positions, *rest, **named)

        monkeypatch.setattr(Eagle3, "predict", wrong)
    run(eagle3_arguments, output=tmp_path / "mutant", **keys)
    right, wrong = read_metrics()[0], read_metrics(run="mutant")[0]
    assert max(abs(wrong[f"head{i}_loss"] / right[f"head{i}_loss"] - 1) for i in range(3)) > 3e-4


def test_every_weight_gets_a_gradient_and_moves_but_the_targets_own(
    eagle3_arguments, tmp_path, monkeypatch, counting_target
):
    found, finish_step = {}, loop.finish_step

    def look(head, *rest, **named):
        found.update({name: parameter.grad for name, parameter in head.named_parameters()})
        found["table"] = head.embed_tokens.weight
        return finish_step(head, *rest, **named)

    monkeypatch.setattr(loop, "finish_step", look)
    run(eagle3_arguments, target=counting_target, max_steps=1, lr=0, output=tmp_path / "start")
    table = found.pop("table").clone()
    assert found.pop("embed_tokens.weight") is None
    assert all(gradient.abs().max() > 1e-6 for gradient in found.values())
    before = head_tensors(tmp_path / "start")
    lm_head = AutoModelForCausalLM.from_pretrained(counting_target).lm_head.weight
    assert torch.equal(before["lm_head.weight"], lm_head[torch.arange(40) + before["d2t"]])
    run(eagle3_arguments, target=counting_target, lr=0.02)
    assert torch.equal(found.pop("table"), table)
    after = head_tensors(tmp_path / "run")
    trained = found.keys() - {"embed_tokens.weight"}
    assert before.keys() == after.keys() == trained | {"d2t", "t2d"}
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in trained)
    assert all(torch.equal(after[name], before[name]) for name in ("d2t", "t2d"))


@pytest.mark.parametrize(("size", "width"), [(0, 0), (40, 0), (0, 16)])
def test_trained_head_is_accepted_by_the_engine(eagle3_arguments, read_metrics, tmp_path, counting_target, size, width):
    keys = {"eval_prompts": 6, "eval_tokens": 16, "num_epochs": 12, "max_steps": 0}
    keys |= {"draft_vocab_size": size, "hidden_size": width}
    run(eagle3_arguments, lr=0.01, target=counting_target, batch_rows=4, **keys)
    lines = read_metrics()
    for i in range(3):
        assert lines[-1][f"head{i}_top1"] > lines[0][f"head{i}_top1"] + 0.3
        assert lines[-1][f"head{i}_loss"] < lines[0][f"head{i}_loss"] - 1
    (acceptance,) = read_metrics("acceptance")
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert acceptance["source"] == saved["source"] == "engine"
    assert acceptance["acceptance_length"] == pytest.approx(1 + sum(acceptance["per_position"]))
    head = load_head(tmp_path / "run")
    assert len(acceptance["per_position"]) == 3 == head.num_speculative_tokens
    assert acceptance["acceptance_length"] > (1.7 if size else 2.5)  # of 48 words eight end every draft
    assert head.features == (0, 1, 2)
    assert head.t2d is None if size == 0 else bool(head.t2d[2])  # the stop token
    assert head.config.hidden_size == (width or 32)
    assert head.needs_embedding == (width == 0)


def test_neither_chunks_nor_micro_steps_change_the_training(eagle3_arguments, read_metrics, tmp_path):
    run(eagle3_arguments, batch_rows=8, accumulate=1, max_steps=3)
    run(eagle3_arguments, batch_rows=1, accumulate=8, max_steps=3, output=tmp_path / "eight")
    run(eagle3_arguments, batch_rows=8, chunk_tokens=7, max_steps=3, output=tmp_path / "chunks")
    for other in ("eight", "chunks"):
        for a, b in zip(read_metrics(), read_metrics(run=other), strict=True):
            assert a == {k: pytest.approx(v, rel=1e-5, abs=1e-6) if type(v) is float else v for k, v in b.items()}
        for name, tensor in head_tensors(tmp_path / "run").items():
            torch.testing.assert_close(head_tensors(tmp_path / other)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("cached", "width"), [(False, 0), (True, 0), (False, 16)])
def test_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(eagle3_arguments, read_metrics, tmp_path, cached, width):
    keys = {
        "hidden_size": width,
        "loss": "lk",  # which hangs on the step before
        "checkpoint_every": 2,
        "keep_checkpoints": 9,
        "eval_every": 3,
        "eval_prompts": 3,
        "eval_tokens": 8,
        "max_steps": 4,
    }
    run(eagle3_arguments, cache_features=cached, **keys)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    checkpoint = tmp_path / "copy" / "checkpoints" / "step-000002"
    run(eagle3_arguments, cache_features=cached, output=tmp_path / "copy", resume_from=checkpoint, **keys)
    for kind in ("train", "acceptance"):
        assert read_metrics(kind) == read_metrics(kind, run="copy") != []
    one, other = head_tensors(tmp_path / "run"), head_tensors(tmp_path / "copy")
    assert all(torch.equal(one[name], other[name]) for name in one)
    states = [torch.load(list_checkpoints(tmp_path / name)[-1] / "optimizer.pt") for name in ("run", "copy")]
    for index, entry in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][name]) for name, value in entry.items())
    assert_rates_are_those_of_their_step(tmp_path / "run")


# ---- the draft vocabulary ----


def choose(documents, size, stop_ids, word_target):
    said, packed = [], pack(documents, 12)
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    _, t2d = eagle3.choose_draft_vocabulary(
        packed, size, stop_ids, vocab_size=48, tokenizer=tokenizer, note=said.append
    )
    return t2d.nonzero().flatten().tolist(), said


def test_draft_vocabulary_is_what_is_supervised_most_and_the_stop_tokens(word_target):
    asked = [False] * 4
    documents = [([30, 30, 30, 30, 7, 7, 8, 2], [*asked, True, True, True, True])] * 3
    documents += [([31, 31, 31, 31, 9, 9, 9, 8], [*asked, True, True, True, True])]
    assert choose(documents, 3, [2], word_target) == (
        [2, 7, 8],
        ["draft vocabulary: 3 of 48 tokens, 81.25% of the supervised ones"],
    )
    # Two answers in one document end twice; the last is without the stop token, and nothing names one.
    ids, said = choose([([5, 6, 6, 2, 5, 6, 6, 3], [False, True, True, True] * 2)], 2, [], word_target)
    assert ids == [2, 6]
    assert (
        "warning: 50% of the answers end with a token that is not in the draft vocabulary, mostly '<unk>' (3)"
        in said[1]
    )
    assert "each of them takes one pass of the target more, in 3 tokens" in said[1]
    # A document that was cut ends with some token, and no answer with it.
    _, said = choose([([30, 31, *range(4, 20)], [False] * 2 + [True] * 16)], 2, [2], word_target)
    assert len(said) == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_steps": 9}, "num_steps must be at most 8, got 9"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens must be at most 8, got 9"),
        ({"aux_layers": "0,1,3"}, r"to at most 2 \(after the last layer of this target\), got \[0, 1, 3\]"),
        ({"aux_layers": "1,0"}, r"layer ids must rise .*got \[1, 0\]"),
        ({"aux_layers": "1;2"}, "aux_layers must be layer numbers with commas between them, as 2,16,29, got '1;2'"),
        ({"aux_layers": ""}, "a target of 2 layers has no default aux layers .*: in a recipe aux_layers, as 1,4"),
        ({"draft_vocab_size": 49}, "draft_vocab_size must be from 2 to the vocab_size 48, got 49"),
        ({"hidden_size": 15}, "hidden_size 15: a head is at most as wide as its target, here 32, .* a multiple of 8"),
        ({"hidden_size": 64}, "hidden_size 64: a head is at most as wide as its target, here 32"),
        ({"draft_vocab_size": 1}, "draft_vocab_size must be from 2 to the vocab_size 48, got 1"),
    ],
)
def test_bad_recipes_are_refused_before_anything_is_written(eagle3_arguments, tmp_path, monkeypatch, keys, message):
    monkeypatch.setattr(rows, "load_conversations", lambda *_, **__: pytest.fail("the data was read"))
    with pytest.raises(ValueError, match=message):
        eagle3.main(eagle3_arguments(**keys))
    assert not (tmp_path / "run").exists()


# ---- every key does something ----

CHANGES = {
    "seed": 1,
    "loss": "hard",
    "lr": 0.02,
    "beta2": 0.5,
    "max_grad_norm": 0.01,
    "num_steps": 2,
    "step_decay": 0.5,
    "draft_vocab_size": 0,
    "aux_layers": "0,2",
    "hidden_size": 16,
}


def observe(arguments, folder, **keys):
    """All that a run leaves behind, apart from what the clock and the memory decide and from the recipe itself."""
    run(arguments, **({"output": folder, "max_steps": 2} | keys))
    return all_lines(folder), {name: tensor.tolist() for name, tensor in head_tensors(folder).items()}


def test_keys_change_the_run_and_equal_recipes_do_not(eagle3_arguments, tmp_path):
    base = observe(eagle3_arguments, tmp_path / "base")
    assert observe(eagle3_arguments, tmp_path / "again") == base
    for name, value in CHANGES.items():
        assert observe(eagle3_arguments, tmp_path / name, **{name: value}) != base, name
    own = {f.name for f in fields(eagle3.Recipe)} - {f.name for f in fields(eagle3.RunRecipe)}
    assert own <= CHANGES.keys() | {"num_speculative_tokens"}


def test_step_decay_scales_each_steps_share_of_the_loss(eagle3_arguments, read_metrics, tmp_path):
    for decay in (0, 0.5, 1):
        run(eagle3_arguments, step_decay=decay, max_steps=1, output=tmp_path / str(decay))
    none, half, full = (read_metrics(run=str(decay))[0] for decay in (0, 0.5, 1))
    assert none["loss"] == pytest.approx(none["head0_loss"], rel=1e-6)
    # Every label here has a root of its own for all three steps, so a step's own loss is its share of the whole.
    assert full["loss"] == pytest.approx(sum(full[f"head{i}_loss"] for i in range(3)), rel=1e-5)
    assert half["loss"] == pytest.approx(sum(0.5**i * half[f"head{i}_loss"] for i in range(3)), rel=1e-5)


def test_every_field_is_read_by_the_run(eagle3_arguments, monkeypatch):
    """Keys that other trainers have too change a run in the tests of train/medusa.py; here they are seen to be asked for."""
    names, seen = {f.name for f in fields(eagle3.Recipe)}, set()

    class Watched(eagle3.Recipe):
        def __getattribute__(self, name):
            if name in names:
                seen.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(eagle3, "Recipe", Watched)
    keys = {"cache_features": True, "eval_prompts": 4, "eval_tokens": 12, "max_steps": 0, "num_epochs": 0.2}
    run(eagle3_arguments, **keys)
    run(eagle3_arguments, resume=True, **keys)
    assert names - seen == set()
