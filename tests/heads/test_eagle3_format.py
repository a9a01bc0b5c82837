"""EAGLE-3 heads survive both layouts, published files with their oddities are read, and what is wrong with one is said by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import check_head_fits, load_head, save_head
from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.eagle3_format import from_file, to_file
from headstart.heads.formats import family_of
from headstart.tests.heads.test_checkpoint import edit_config, llama_config, rewrite, same_head
from headstart.tests.heads.test_eagle import H, T, V, one_document, text
from headstart.tests.heads.test_eagle3 import HT, VD, make
from headstart.tests.heads.test_eagle_format import KV, I, Q, drop, keep, put

IDS = "eagle_aux_hidden_state_layer_ids"
COUNTS = torch.randint(100, (V,), generator=torch.Generator().manual_seed(3))


def published(prefix="midlayer.", draft_vocab_size=VD):
    """A file's tensors with exactly the published names and shapes, and the config of a published head."""
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (draft_vocab_size, H)}
    shapes |= {f"{prefix}self_attn.{one}_proj.weight": (rows, 2 * H) for one, rows in zip("qkv", (Q, KV, KV))}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (H, Q), f"{prefix}mlp.down_proj.weight": (H, I)}
    shapes |= {f"{prefix}mlp.{one}_proj.weight": (I, H) for one in ("gate", "up")}
    shapes |= {f"{prefix}{one}.weight": (H,) for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if draft_vocab_size < V:
        tensors["d2t"], tensors["t2d"] = build_draft_vocabulary(COUNTS, draft_vocab_size)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": V, "draft_vocab_size": draft_vocab_size}
    return tensors, config | {"hidden_size": H, "num_attention_heads": 6, "head_dim": 10, "rms_norm_eps": 1e-5}


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
    assert family_of(loaded) == "EAGLE-3"
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
    expected, _ = published()
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {name: t.shape for name, t in expected.items()}
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
    assert set(tensors) == {*published("layers.0.")[0], "embed_tokens.weight"}
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
        ValueError, match=r"'speculators' stores the target's embedding: call head\.take_embedding first"
    ):
        save_head(loaded, tmp_path / "other", format="speculators")
    loaded.take_embedding(table)
    save_head(loaded, tmp_path / "other", format="speculators", dtype="float32")
    assert torch.equal(load_head(tmp_path / "other").embed_tokens.weight, table)
    # A table of unknown origin is not given up.
    save_head(load_head(tmp_path / "other"), tmp_path / "third", format="eagle3")
    assert torch.equal(load_head(tmp_path / "third").embed_tokens.weight, table)


def test_a_form_that_readers_of_the_plain_layout_do_not_know_is_refused(tmp_path):
    head = with_table(make(norm_before_residual=True))
    with pytest.raises(ValueError, match="read as norm_before_residual false, this head has true: use 'speculators'"):
        save_head(head, tmp_path / "head", format="eagle3")
    save_head(head, tmp_path / "head")
    assert load_head(tmp_path / "head").config.norm_before_residual


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_published_files_say_little(prefix):
    """No aux layers, no rope_theta, no embedding, either name of the layer."""
    shape, state, *_ = from_file(*published(prefix))
    assert (shape.aux_layer_ids, shape.num_aux_layers, shape.rope_theta, shape.norm_before_residual) == (
        None,
        3,
        1e4,
        False,
    )
    assert (shape.vocab_size, shape.draft_vocab_size, shape.target_hidden_size, shape.attention_bias) == (
        V,
        VD,
        H,
        False,
    )
    expected, _ = published()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_t2d_follows_from_d2t_and_the_whole_vocabulary_needs_neither():
    tensors, config = published()
    t2d = tensors.pop("t2d")
    assert torch.equal(from_file(tensors, config)[1]["t2d"], t2d)
    tensors, config = published(draft_vocab_size=V)
    assert "d2t" not in from_file(tensors, config)[1]
    tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    assert "d2t" not in from_file(tensors, config)[1]
    tensors["d2t"][0], tensors["d2t"][1] = 1, -1
    with pytest.raises(ValueError, match="d2t reorders the whole vocabulary, expected zeros"):
        from_file(tensors, config)


def test_draft_tokens_in_another_order_are_read_as_they_are():
    tensors, config = published()
    ids = (torch.arange(VD) + tensors["d2t"])[torch.randperm(VD, generator=torch.Generator().manual_seed(1))]
    tensors["d2t"] = ids - torch.arange(VD)
    assert torch.equal(from_file(tensors, config)[1]["d2t"], tensors["d2t"])


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
    tensors, config = published()
    assert from_file(tensors, config | keys)[0].aux_layer_ids == (1, 4, 9)


def test_a_speculators_file_without_the_key_norms_before_the_residual():
    head = make(target_hidden_size=H)
    tensors, config = to_file(head, "speculators")
    del config["norm_before_residual"]
    assert from_file(tensors, config)[0].norm_before_residual
    tensors, config = to_file(head, "eagle3")
    del config["norm_before_residual"]
    assert not from_file(tensors, config)[0].norm_before_residual


def test_heads_of_another_target_are_refused(tmp_path):
    target = llama_config()
    target.num_hidden_layers = 8
    head = make(target_hidden_size=H)
    check_head_fits(head, target)
    target.num_hidden_layers = 5
    check_head_fits(head, target)  # 5 is what is behind its last layer
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
    rewrite(tmp_path / "head", drop("layers.0.hidden_norm.weight"), "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: .*missing: layers\.0\.hidden_norm\.weight$"):
        load_head(tmp_path / "head")


def offsets(*changes):
    def change(tensors):
        for place, id in changes:
            tensors["d2t"][place] = id - place

    return change


UNUSED = int((~build_draft_vocabulary(COUNTS, VD)[1]).nonzero()[0])  # a token that is not in the draft vocabulary


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (drop("norm.weight"), {}, r"missing: norm\.weight$"),
        (drop("midlayer.hidden_norm.weight"), {}, r"missing: midlayer\.hidden_norm\.weight$"),
        (drop("lm_head.weight"), {}, r"tensor lm_head\.weight is missing"),
        (drop("d2t"), {}, r"missing: d2t; tensor lm_head\.weight has 11 rows of a vocabulary of 37"),
        (put("fc.bias", torch.ones(H)), {}, r"unexpected: fc\.bias$"),
        (put("layers.0.hidden_norm.weight", torch.ones(H)), {}, r"unexpected: layers\.0\.hidden_norm\.weight$"),
        (
            put("midlayer.self_attn.v_proj.weight", torch.ones(KV, H)),
            {},
            r"v_proj\.weight is \(20, 24\), expected \(20, 48\)",
        ),
        (
            put("norm.weight", torch.ones(H, dtype=torch.int32)),
            {},
            r"norm\.weight is torch\.int32, expected floating point",
        ),
        (
            put("d2t", torch.zeros(VD - 1, dtype=torch.int64)),
            {},
            r"d2t is torch\.int64 \(10,\), expected torch\.int64 \(11,\)",
        ),
        (put("d2t", torch.zeros(VD)), {}, r"d2t is torch\.float32 \(11,\), expected torch\.int64"),
        (offsets((VD - 1, V)), {}, rf"d2t gives draft token {VD - 1} the id {V} .*, expected ids from 0 to {V - 1}"),
        (offsets((0, -1)), {}, r"d2t gives draft token 0 the id -1 \(d2t holds offsets: 0 \+ -1\)"),
        (offsets((3, 5), (4, 5)), {}, "d2t gives 2 ids more than once, expected distinct ones"),
        (offsets((0, UNUSED)), {}, "t2d disagrees with d2t on 2 tokens: it says"),
        (
            put("t2d", torch.zeros(V, dtype=torch.uint8)),
            {},
            r"t2d is torch\.uint8 \(37,\), expected torch\.bool \(37,\)",
        ),
        (put("t2d", torch.zeros(V - 1, dtype=torch.bool)), {}, r'"vocab_size": 37, tensor t2d says 36'),
        (keep, {"draft_vocab_size": 12}, r'"draft_vocab_size": 12, tensor lm_head\.weight has 11 rows'),
        (
            keep,
            {"target_hidden_size": HT},
            r"fc\.weight has 72 columns, expected 60: the 3 aux layers of a file that names none",
        ),
        (keep, {IDS: [1, 2]}, r"fc\.weight has 72 columns, expected 48: its 2 aux layers"),
        (keep, {IDS: [1, 4, 9], "eagle_config": {IDS: [1, 4, 9]}}, r"numbers are one less: expected \[0, 3, 8\] there"),
        (keep, {IDS: "1,2,3"}, "expected a list of layer numbers"),
        (keep, {IDS: [4, 4, 9]}, r"aux_layer_ids must be ascending layer numbers, got \(4, 4, 9\)"),
        (keep, {"norm_before_residual": "no"}, "norm_before_residual must be true or false, got 'no'"),
        (keep, {"target_hidden_size": 36, IDS: [1, 2]}, r"missing: embed_tokens\.weight$"),
        (keep, {"speculators_model_type": "eagle"}, '"speculators_model_type": \'eagle\', expected "eagle3"'),
        (keep, {"speculators_model_type": "eagle3"}, "no speculators config: expected transformer_layer_config"),
        (keep, {"speculators_model_type": "eagle3", "fc_norm": True}, '"fc_norm": True; only false is supported'),
    ],
)
def test_what_is_wrong_with_a_file_is_named(change, keys, message):
    tensors, config = published()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        from_file(tensors, config | keys)
