"""EAGLE-3 heads survive both layouts, whose configs have the keys that their readers need. Published files: test_published.py."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import check_head_fits, load_head, save_head
from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.families import family_of
from headstart.heads.formats.eagle3 import from_file
from headstart.tests.heads.published_eagle import COUNTS, IDS, eagle3, eagle3_config, llama
from headstart.tests.heads.test_checkpoint import edit_config, llama_config, rewrite, same_head
from headstart.tests.heads.test_eagle import H, T, V, one_document, text
from headstart.tests.heads.test_eagle3 import HT, VD, make


def with_table(head):
    """The head with a draft vocabulary that is not the first tokens, in the dtype of files."""
    if head.d2t is not None:
        head.set_draft_vocabulary(*build_draft_vocabulary(COUNTS, VD))
    return head.float()


@pytest.mark.parametrize("draft_vocab_size", [VD, V])
@pytest.mark.parametrize(
    ("format", "normed", "width"),
    [("eagle3", False, HT), ("eagle3", False, H), ("speculators", False, H), ("speculators", True, HT)],
)
def test_saved_heads_load_bit_by_bit(tmp_path, format, normed, width, draft_vocab_size):
    shape = dict(draft_vocab_size=draft_vocab_size, norm_before_residual=normed, target_hidden_size=width)
    shape |= dict(num_speculative_tokens=7, base_model_name_or_path="some/target")
    head = with_table(make(**shape, rope_scaling={"rope_type": "linear", "factor": 2.0}))
    save_head(head, tmp_path / "head", format=format)
    loaded = load_head(tmp_path / "head")
    assert family_of(loaded).name == "EAGLE-3"
    assert loaded.config == head.config
    assert same_head(loaded, head)
    assert loaded.features == (1, 3, 5)
    assert loaded.embed_tokens.weight.requires_grad is (width != H)
    features, tokens = text(width=3 * width, steps=(3,))
    inputs = (features.float(), tokens, *one_document(T), 3)
    assert all(torch.equal(one, two) for one, two in zip(loaded(*inputs), head(*inputs)))


def test_files_hold_the_published_names_and_keys(tmp_path):
    head = with_table(make(target_hidden_size=H))
    head.take_embedding(torch.randn(V, H))
    save_head(head, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in eagle3(head_dim=10).items()
    }
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"], config["hidden_size"]) == (V, VD, H)
    assert "target_hidden_size" not in config  # with it the original code does not take the target's embedding
    assert (config["norm_before_residual"], config["tie_word_embeddings"], config["head_dim"]) == (False, False, 10)
    assert (config[IDS], config["eagle_config"][IDS]) == ([1, 3, 5], [0, 2, 4])
    assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (500.0, 500.0)

    save_head(head, tmp_path / "speculators", format="speculators")
    tensors = load_file(tmp_path / "speculators" / "model.safetensors")
    assert set(tensors) == {*eagle3("layers.0."), "embed_tokens.weight"}
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3DraftModel"])
    assert "model_type" not in config
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["norm_before_residual"]) == (VD, H, False)
    assert (config["norm_before_fc"], config["fc_norm"], config["norm_output"]) == (False, False, False)
    assert config[IDS] == [1, 3, 5]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    assert config["speculators_config"]["proposal_methods"] == [proposal]
    assert config["speculators_config"]["algorithm"] == "eagle3"
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["hidden_size"], layer["vocab_size"], layer["head_dim"]) == ("llama", H, V, 10)


def test_the_targets_embedding_stays_out_of_plain_files_only(tmp_path):
    head = with_table(make(target_hidden_size=H))
    table = torch.randn(V, H).bfloat16().float()
    head.take_embedding(table)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head", dtype="bfloat16")
    assert loaded.needs_embedding
    assert (loaded.d2t.dtype, loaded.t2d.dtype, loaded.fc.weight.dtype) == (torch.int64, torch.bool, torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"'speculators' stores the target's embedding, which this head lacks: call head\.take_embedding first",
    ):
        save_head(loaded, tmp_path / "other", format="speculators")
    loaded.take_embedding(table)
    save_head(loaded, tmp_path / "other", format="speculators", dtype="float32")
    other = load_head(tmp_path / "other")
    assert torch.equal(other.embed_tokens.weight, table)
    assert other.embedding_is_targets  # the file says so, and a plain file needs no embedding
    save_head(other, tmp_path / "third", format="eagle3")
    assert load_head(tmp_path / "third").needs_embedding
    # An embedding of unknown origin is kept.
    edit_config(tmp_path / "other", transformer_layer_config=llama(head_dim=10))
    save_head(load_head(tmp_path / "other"), tmp_path / "fourth", format="eagle3")
    assert torch.equal(load_head(tmp_path / "fourth").embed_tokens.weight, table)


def test_a_form_that_readers_of_the_plain_layout_do_not_know_is_refused(tmp_path):
    head = with_table(make(norm_before_residual=True))
    with pytest.raises(
        ValueError, match="take norm_before_residual as false, and it is true for this head: use 'speculators'"
    ):
        save_head(head, tmp_path / "head", format="eagle3")
    save_head(head, tmp_path / "head")
    assert load_head(tmp_path / "head").config.norm_before_residual


def test_draft_tokens_in_another_order_are_read_as_they_are():
    tensors = eagle3()
    ids = (torch.arange(VD) + tensors["d2t"])[torch.randperm(VD, generator=torch.Generator().manual_seed(1))]
    tensors["d2t"] = ids - torch.arange(VD)
    assert torch.equal(from_file(tensors, eagle3_config())[1]["d2t"], tensors["d2t"])


@pytest.mark.parametrize(
    "keys",
    [
        {IDS: [1, 4, 9]},
        {"eagle_config": {IDS: [0, 3, 8]}},
        {IDS: [9, 1, 4], "eagle_config": {IDS: [8, 0, 3], "use_aux_hidden_state": True}},
        {IDS: None, "eagle_config": {IDS: [0, 3, 8]}},
    ],
)
def test_aux_layers_are_read_in_both_countings(keys):
    assert from_file(eagle3(), eagle3_config(**keys))[0].aux_layer_ids == (1, 4, 9)


def test_heads_of_another_target_are_refused(tmp_path):
    target = llama_config()
    target.num_hidden_layers = 8
    head = make(target_hidden_size=H)
    check_head_fits(head, target)
    target.num_hidden_layers = 5
    check_head_fits(head, target)  # 5 is the stream after its last layer
    target.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"aux layers \[1, 3, 5\], the target has layers 0 to 3 and 4"):
        check_head_fits(head, target)
    with pytest.raises(ValueError, match=rf"hidden size {HT}, the target has {H}"):
        check_head_fits(make(), target)
    with pytest.raises(ValueError, match="a target of 4 layers has no default aux layers"):
        check_head_fits(make(target_hidden_size=H, aux_layer_ids=None), target)


def test_a_lost_norm_does_not_make_it_a_head_of_another_family(tmp_path):
    save_head(make(draft_vocab_size=V, target_hidden_size=H).float(), tmp_path / "head", format="speculators")
    edit_config(tmp_path / "head", model_type="medusa")
    rewrite(tmp_path / "head", lambda tensors: tensors.pop("layers.0.hidden_norm.weight"), "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: .*missing: layers\.0\.hidden_norm\.weight$"):
        load_head(tmp_path / "head")
