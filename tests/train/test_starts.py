"""The head that a run starts from, of another run or published: train/run/start_head.py."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoint import load_head, save_head
from headstart.tests.train.tiny_runs import (
    all_lines,
    assert_same_run,
    assert_same_tensors,
    head_tensors,
    in_step,
    optimizer_state,
    terminate,
)
from headstart.tests.train.trainings import HEADS, RESUMABLE

OF = {
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "block": "a block drafter",
}
KEPT = {"eagle3": {"draft_vocab_size": 0, "aux_layers": ""}}  # what the recipe leaves to the start


@pytest.mark.parametrize("family", HEADS)
def test_it_starts_from_the_weights_of_another_head(trainers, start, word_target, family):
    """The layer of an EAGLE head has the start's sizes, not those of the target's layers, and the optimiser is a new one."""
    folder = start(family)
    run = trainers[family].run(max_steps=1, lr=0, start_from=folder, **KEPT.get(family, {}))
    assert_same_tensors(head_tensors(run), head_tensors(folder.parent))
    assert {entry["step"].item() for entry in optimizer_state(run)["state"].values()} == {1}
    configs = [json.loads((one / "config.json").read_text()) for one in (run / "head", folder)]
    assert configs[0].pop("base_model_name_or_path", None) in (word_target, None)
    assert not {key for key, value in configs[1].items() if value and configs[0][key] != value} - {
        "base_model_name_or_path",
        "num_speculative_tokens",
        "num_lookahead_tokens",
    }


@pytest.mark.parametrize("family", ["medusa", "mlp_speculator", "eagle"])
def test_start_of_a_run_tells_that_it_is_the_best_head(trainers, start, tmp_path, capsys, family):
    for name in ("best", "head"):
        shutil.copytree(start(family), tmp_path / "first" / name)
    trainers[family].run(max_steps=1, start_from=tmp_path / "first")
    said = f"start_from {tmp_path / 'first'}: taking {tmp_path / 'first' / 'best'}, the head that was measured best"
    assert said in capsys.readouterr().err
    trainers[family].run(max_steps=1, start_from=tmp_path / "first" / "head", output=tmp_path / "other")
    assert "measured best" not in capsys.readouterr().err


@pytest.mark.parametrize("family", ["eagle", "eagle3", "block"])
def test_started_run_goes_on_without_its_start(trainers, start, tmp_path, family):
    """And keeps the layer and the draft vocabulary that came from there."""
    trainer, keys = (
        trainers[family],
        RESUMABLE | ({"draft_vocab_size": 0, "aux_layers": "0,2"} if family == "eagle3" else {}),
    )
    whole = trainer.run(**keys, start_from=start(family), output=tmp_path / "whole")
    moved = shutil.copytree(start(family), tmp_path / "start")
    with in_step(3, terminate):
        assert trainer.main(**keys, start_from=moved) == 128 + signal.SIGTERM
    with pytest.raises(ValueError, match=f"was started with start_from '{moved}', not ''"):
        trainer.main(**keys | ({"draft_vocab_size": 24} if family == "eagle3" else {}), resume=True)
    shutil.rmtree(moved)
    assert_same_run(whole, trainer.run(**keys, start_from=moved, resume=True))


def test_published_files_of_another_format_are_a_start(trainers, start, word_target, tmp_path, capsys):
    """With a layer that no recipe asks for, and a copy of the target's embedding in another dtype."""
    head = load_head(start("eagle3"))
    head.config = replace(head.config, norm_before_residual=True)
    head.take_embedding(AutoModelForCausalLM.from_pretrained(word_target).get_input_embeddings().weight)
    head.embedding_is_targets = False
    save_head(head, tmp_path / "published", "speculators", dtype="bfloat16")
    run = trainers["eagle3"].run(max_steps=1, lr=0, start_from=tmp_path / "published", **KEPT["eagle3"])
    found = load_head(run)
    assert found.config.norm_before_residual
    assert found.embedding_is_targets
    assert torch.equal(found.embed_tokens.weight, head.embed_tokens.weight)
    for name, weight in load_head(tmp_path / "published", dtype="float32").named_parameters():
        assert name == "embed_tokens.weight" or torch.equal(found.get_parameter(name), weight)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_embedding_that_is_not_the_targets_is_kept(trainers, start, word_target, tmp_path, capsys, family):
    head, own = load_head(start(family)), torch.randn(48, 32)
    head.take_embedding(own)
    head.embedding_is_targets = False
    save_head(head, tmp_path / "start")
    keys = RESUMABLE | KEPT.get(family, {}) | {"start_from": tmp_path / "start", "max_steps": 3}
    run = trainers[family].run(**keys)
    assert "the head's embedding is not the target's: it is kept" in capsys.readouterr().err
    assert torch.equal(head_tensors(run)["embed_tokens.weight"], own)
    again = trainers[family].run(**keys | {"max_steps": 4}, resume=True)
    assert torch.equal(head_tensors(again)["embed_tokens.weight"], own)


@pytest.mark.parametrize(("size", "narrow"), [(24, False), (30, False), (48, False), (30, True)])
def test_draft_vocabulary_chosen_from_the_data_keeps_the_rows_it_shares(
    trainers, start, finished, word_target, capsys, size, narrow
):
    width = {"hidden_size": 16, "num_attention_heads": 2} if narrow else {}
    folder, keys = start("eagle3", **width), {"max_steps": 1, "lr": 0, "draft_vocab_size": size}
    run = trainers["eagle3"].run(**keys, start_from=folder, aux_layers="")
    said = capsys.readouterr().err
    new = load_head(trainers["eagle3"].run(**keys, output=run.parent / "new", hidden_size=width.get("hidden_size", 0)))
    before, after = load_head(folder), load_head(run)
    ids = torch.arange(48) if size == 48 else after.draft_token_ids
    assert torch.equal(ids, torch.arange(48) if size == 48 else new.draft_token_ids)  # as for a new head
    at = {id: place for place, id in enumerate(before.draft_token_ids.tolist())}
    shared = sum(id in at for id in ids.tolist())
    assert 0 < shared < size
    assert f"{shared} of {size} draft tokens are the start's" in said
    for place, id in enumerate(ids.tolist()):
        given = before.lm_head.weight[at[id]] if id in at else new.lm_head.weight[place]
        assert torch.equal(after.lm_head.weight[place], given)
    assert torch.equal(after.fc.weight, before.fc.weight)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("mlp_speculator", {"num_steps": 4}, "is a head of num_steps 3, this run asks for 4"),
        ("mlp_speculator", {"inner_size": 0}, "is a head of inner_size 24, this run asks for 32"),
        ("mlp_speculator", {"tie_weights": False}, "is a head of tie_weights True, this run asks for False"),
        ("mlp_speculator", {"scale_input": False}, "is a head of scale_input True, this run asks for False"),
        ("medusa", {"num_layers": 2}, "has num_layers 1, this run asks for 2"),
        ("joint", {"num_heads": 2}, "has num_heads 3, this run asks for 2"),
        ("eagle3", {}, r"has aux_layers \(0, 2\), this run asks for \(0, 1, 2\): leave aux_layers out"),
        ("eagle3", {"aux_layers": "", "hidden_size": 16}, "has hidden_size 32, this run asks for 16"),
        ("block", {"num_layers": 3}, "has num_layers 2, this run asks for 3: leave it out"),
        ("block", {"mask_token_id": 3}, "has mask_token_id 9, this run asks for 3: leave it out"),
        ("block", {"aux_layers": "0"}, r"has aux_layers \(0, 1\), this run asks for \(0,\): leave it out"),
        ("block", {"sliding_window": 6}, r"has sliding_layers \(\), this run asks for \(0,\): leave it out"),
        ("block", {"edge_rank": 5}, "has edge_rank 4, this run asks for 5: set it to 4"),
        ("block", {"edge_rank": 0}, "has edge_rank 4, this run asks for 0: set it to 4"),
        ("block", {"edge_rank": 0, "selector_rank": 3}, "has edge_rank 4, this run asks for 0: set it to 4"),
        ("block", {"selector_rank": 3}, "set edge_rank to 0"),
        ("block", {"is_causal": True}, "has is_causal False, this run asks for True: set it to False"),
    ],
)
def test_start_of_another_shape_is_refused(trainers, start, tmp_path, family, keys, message):
    trainer = trainers[family]
    with pytest.raises(ValueError, match=message):
        trainer.main(start_from=start(trainer.training.family), **keys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", HEADS)
def test_start_of_another_family_or_from_nothing_is_refused(trainers, start, tmp_path, family):
    wrong, other = ("medusa", "Medusa") if family != "medusa" else ("mlp_speculator", "MLP speculator")
    with pytest.raises(ValueError, match=f"holds a head of the family {other}, not {OF[family]}"):
        trainers[family].main(start_from=start(wrong))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no head"):
        trainers[family].main(start_from=tmp_path / "empty")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["eagle", "eagle3", "block"])
def test_start_made_for_another_target_is_refused(trainers, start, tmp_path, family):
    other = {"vocab_size": 50} if family != "eagle3" else {"target_hidden_size": 24}
    with pytest.raises(
        ValueError, match=r"start_from .*does not fit this target: it has (vocabulary 50|hidden size 24)"
    ):
        trainers[family].main(start_from=start(family, **other))
    assert not (tmp_path / "run").exists()


def test_block_drafter_gets_the_edge_and_the_slots_that_its_start_has_not(trainers, start, capsys):
    folder = start("block", edge_rank=0)
    run = trainers["block"].run(max_steps=1, lr=0, start_from=folder, block_size=7)
    assert (
        "new, as the start has none: markov_head.markov_w1.weight, markov_head.markov_w2.weight"
        in capsys.readouterr().err
    )
    before, after = load_head(folder), load_head(run)
    assert (after.config.block_size, after.config.edge_rank, before.config.block_size) == (7, 4, 4)
    assert not after.markov_head.markov_w2.weight.any()
    assert all(
        torch.equal(after.get_parameter(name), one) for name, one in before.named_parameters() if "embed" not in name
    )


def test_block_drafter_gets_the_parts_of_dflash2_that_its_start_has_not(trainers, start, capsys):
    """Without effect at first: the drafts are the start's."""
    folder = start("block", edge_rank=0)
    keys = {"edge_rank": 0, "max_steps": 1, "lr": 0, "start_from": folder}
    parts = {"selector_rank": 3, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8}
    run = trainers["block"].run(**keys, **parts)
    said = capsys.readouterr().err
    assert "new, as the start has none: " in said
    assert "candidate_selector.successor_codebook" in said
    before, after = load_head(folder), load_head(run)
    assert {name: getattr(after.config, name) for name in parts} == parts
    torch.manual_seed(0)
    embedding, lm_head, tokens = torch.randn(48, 32), torch.randn(48, 32), torch.randint(48, (1, 9))
    batch = torch.randn(1, 9, 64), tokens, torch.arange(9)[None], torch.zeros_like(tokens)
    for head in (before, after):
        head.take_embedding(embedding)
    plain, corrected = (head.predict(*batch, lm_head) for head in (before, after))
    for k in range(3):
        one, other = (found.logits(found.states[k], k) for found in (plain, corrected))
        assert torch.equal(one[other > -torch.inf], other[other > -torch.inf])
    again = {"output": run.parent / "again", "start_from": run}
    for changed, message in (
        ({"selector_rank": 4}, "has selector_rank 3, this run asks for 4: set it to 3"),
        ({"selector_rank": 0}, "has selector_rank 3, this run asks for 0: set it to 3"),
        ({"conv_group_size": 4}, "has conv_group_size 8, this run asks for 4: set it to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            trainers["block"].main(**keys | parts | again | changed)


def test_block_drafter_keeps_the_scales_of_its_start(trainers, start, tmp_path):
    """And trains by them: the first loss is another."""
    scales = {"output_multiplier": 0.5, "final_logit_softcapping": 4.0, "input_embedding_scale": 2.0}
    losses = []
    for changes in (scales, {}):
        keys = {"max_steps": 1, "lr": 0, "output": tmp_path / str(len(losses))}
        run = trainers["block"].run(**keys, start_from=start("block", **changes))
        config = load_head(run).config
        assert {name: getattr(config, name) for name in changes} == changes
        losses.append(all_lines(run, "train")[0]["loss"])
    assert losses[0] != losses[1]


def test_block_drafter_keeps_the_draft_vocabulary_of_its_start(trainers, finished):
    one = finished("block", max_steps=2, draft_vocab_size=30)
    again = trainers["block"].run(max_steps=1, lr=0, start_from=one)
    assert_same_tensors(head_tensors(one), head_tensors(again))
    assert len(load_head(again).draft_token_ids) == 30


def test_confidence_of_a_start_is_not_dropped_unasked(trainers, finished, tmp_path):
    one = finished("block", max_steps=2, confidence_weight=1)
    with pytest.raises(ValueError, match="has a confidence, and this run trains none: set confidence_weight above 0"):
        trainers["block"].main(start_from=one)
    again = trainers["block"].run(max_steps=1, lr=0, start_from=one, confidence_weight=0.5)
    assert_same_tensors(head_tensors(one), head_tensors(again))


def test_heads_trained_with_an_adapter_are_no_start(trainers, finished, tmp_path):
    with pytest.raises(ValueError, match="was trained with an adapter already"):
        trainers["joint"].main(start_from=finished("joint", max_steps=2))
    assert not (tmp_path / "run").exists()
