"""Files of block drafters: what is written is read back, published keys of three layouts are read, and other members are named."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.checkpoint import load_head, read_head, save_head
from headstart.heads.families import family_of, from_file, recognise, to_file

SHAPE = dict(
    hidden_size=24,
    vocab_size=50,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=2,
    mask_token_id=49,
    aux_layer_ids=(2, 4, 6),
    num_target_layers=8,
    num_speculative_tokens=5,
    rope_theta=1e6,
    base_model_name_or_path="some/target",
)


def make(**changes):
    torch.manual_seed(0)
    head = BlockHead(BlockConfig(**SHAPE | changes))
    head.take_embedding(torch.randn(50, 24))
    return head


def file_of(head=None):
    """A file as z-lab's code writes it: of the keys that we write, only those that it has."""
    tensors, config = to_file(head or make(), "dflash")
    for key in ("is_causal", "rope_parameters", "num_speculative_tokens", "dtype", "mlp_bias"):
        config.pop(key, None)
    return tensors, json.loads(json.dumps(config))


DSPARK = dict(edge_rank=3, confidence=True, sample_from_anchor=True)
DFLASH2 = dict(selector_rank=3, selector_top_k=7, conv_kernel_size=2, conv_group_size=4)
VARIANTS = {
    "dflash": {},
    "dflash-causal": dict(is_causal=True),
    "dflash-sliding": dict(sliding_layers=(1,), sliding_window=9),
    "dflash-sliding-causal": dict(sliding_layers=(0,), sliding_window=9, sliding_is_causal=True),
    "dflash-sliding-all_causal": dict(sliding_layers=(0,), sliding_window=9, sliding_is_causal=True, is_causal=True),
    "dflash-sliding-of_block": dict(sliding_layers=(0, 1), sliding_window=9, window_of_block=True),
    "dflash-sliding-of_block-causal": dict(
        sliding_layers=(1,), sliding_window=9, window_of_block=True, sliding_is_causal=True
    ),
    "dflash-anchored": dict(sample_from_anchor=True),
    "dflash-draft_vocabulary": dict(draft_vocab_size=20),
    "dflash-lm_head": dict(draft_vocab_size=50),
    "dflash-embedding_stream": dict(aux_layer_ids=(0, 4), num_target_layers=None),
    "dspark": DSPARK,
    "dspark-all": DSPARK | dict(draft_vocab_size=20, confidence_sees_token=False, sample_from_anchor=False),
    "dspark-edge": dict(edge_rank=3),
    "dspark-confidence": dict(confidence=True, confidence_sees_token=False),
    "dflash2": DFLASH2,
    "dflash2-lm_head": DFLASH2 | dict(draft_vocab_size=50, conv_kernel_size=3, conv_group_size=24),
    "dflash2-selector": dict(selector_rank=3, selector_top_k=7),
    "dflash2-convolution": dict(conv_kernel_size=2, conv_group_size=8, draft_vocab_size=20),
    "dflash2-anchored": DFLASH2 | dict(sample_from_anchor=True),
}
REFUSED = {  # by the format speculators
    "dflash-causal": "let a slot see its whole block",
    "dflash-sliding": "this head's counts from the slot",
    "dflash-sliding-causal": "this head's counts from the slot",
    "dflash-sliding-all_causal": "let a slot see its whole block",
    "dflash2-selector": "build both of DFlash2's parts, and this head has a selector alone",
    "dflash2-convolution": "build both of DFlash2's parts, and this head has convolutions alone",
    "dflash2-anchored": "refuse a selector where every slot predicts the next token",
}


@pytest.mark.parametrize("format", ["dflash", "speculators"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("own_embedding", [False, True])
def test_every_variant_is_read_back(tmp_path, variant, format, own_embedding):
    head, lm_head = make(**VARIANTS[variant]), torch.randn(50, 24)
    if head.d2t is not None:
        ids = torch.randperm(50)[:20].sort().values
        head.set_draft_vocabulary(ids - torch.arange(20), torch.isin(torch.arange(50), ids))
    head.embedding_is_targets = not own_embedding
    if format == "speculators" and variant in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[variant]):
            save_head(head, tmp_path / "head", format, lm_head_weight=lm_head)
        return
    save_head(head, tmp_path / "head", format, lm_head_weight=lm_head)
    file = read_head(tmp_path / "head")
    assert (file.format, file.notes, file.head.config) == (format, (), head.config)
    assert file.head.embedding_is_targets == head.embedding_is_targets
    assert file.head.needs_embedding == (format == "dflash" and not own_embedding)
    found, expected = file.head.state_dict(), head.state_dict()
    assert expected.keys() - found.keys() == ({"embed_tokens.weight"} if file.head.needs_embedding else set())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    stored = load_file(tmp_path / "head" / "model.safetensors")
    if format == "speculators" and head.uses_target_lm_head:
        assert torch.equal(stored["lm_head.weight"], lm_head)


def test_a_speculators_file_needs_the_target_s_tables():
    head = make()
    with pytest.raises(ValueError, match="which this head uses: give lm_head_weight"):
        to_file(head, "speculators")
    head.embed_tokens = None
    with pytest.raises(ValueError, match="which this head lacks"):
        to_file(head, "speculators", torch.zeros(50, 24))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_head_is_read_back(tmp_path, is_causal):
    head = make(is_causal=is_causal)
    save_head(head, tmp_path / "head")
    file = read_head(tmp_path / "head")
    assert (file.format, file.notes, file.head.config) == ("dflash", (), head.config)
    assert family_of(file.head).key == "block"
    assert file.head.needs_embedding
    found, expected = file.head.state_dict(), head.state_dict()
    assert found.keys() == expected.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    said = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (said["architectures"], said["model_type"], said["block_size"]) == (["DFlashDraftModel"], "qwen3", 6)
    assert said["dflash_config"] == {"mask_token_id": 49, "target_layer_ids": [1, 3, 5]}
    assert load_head(tmp_path / "head", dtype="bfloat16").fc.weight.dtype == torch.bfloat16


def test_published_names_are_z_labs():
    """The list is of files on the Hub, written out here: to_file and from_file agree with each other whatever they say."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    parts = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{one}_proj" for one in ("gate", "up", "down"))]
    parts += [f"self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names |= {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    tensors, _ = to_file(make(), "dflash")
    assert tensors.keys() == names
    assert recognise(names).key == "block"


def random_head(**changes):
    head = make(**changes)
    for parameter in head.parameters():
        parameter.data.normal_()
    return head


def test_dspark_s_keys_stand_where_its_readers_look():
    """As SpecForge writes them for SGLang: at the top and in dflash_config, which vLLM reads for sample_from_anchor."""
    tensors, config = to_file(random_head(**DSPARK), "dflash")
    names = {f"markov_head.markov_w{i}.weight" for i in (1, 2)} | {
        f"confidence_head.proj.{x}" for x in ("weight", "bias")
    }
    assert tensors.keys() - to_file(make(), "dflash")[0].keys() == names
    assert config["architectures"] == ["Qwen3DSparkModel"]
    dspark = dict(
        markov_rank=3, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True
    )
    dspark |= dict(mask_token_id=49, target_layer_ids=[1, 3, 5])
    assert {key: config[key] for key in dspark} == dspark
    assert config["dflash_config"] == dspark | dict(projector_type="dspark", sample_from_anchor=True)
    assert config["block_size"] == 5


def test_dflash2_s_names_and_keys_are_z_labs():
    """The keys and shapes of z-lab/Qwen3.8-27B-DFlash2's kind, but for sliding windows, and those of the speculators library."""
    shape = DFLASH2 | dict(conv_group_size=6)
    head = random_head(**shape)
    tensors, config = to_file(head, "dflash")
    plain = to_file(make(), "dflash")[0]
    shapes = {f"candidate_selector.{one}_codebook": (50, 3) for one in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (3, 24)
    for name in (f"layers.{i}.{one}_conv" for i in range(2) for one in ("attention", "mlp")):
        shapes |= {f"{name}.base_kernel": (2, 2, 24), f"{name}.kernel_projection.weight": (4 * 24 // 6, 24)}
    assert {name: tuple(tensors[name].shape) for name in tensors.keys() - plain.keys()} == shapes
    keys = dict(conv_kernel_size=2, conv_group_size=6, selector_rank=3, selector_top_k=7)
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["dflash_config"] == keys | dict(block_size=6, mask_token_id=49, target_layer_ids=[1, 3, 5])
    del config["block_size"]  # in z-lab's files it is in dflash_config alone
    _, reading = from_file(tensors, config)
    assert (reading.config, reading.format, reading.notes) == (head.config, "dflash", [])
    tensors, config = to_file(head, "speculators", torch.randn(50, 24))
    said = dict(speculators_model_type="dflash2", architectures=["DFlash2DraftModel"], sample_from_anchor=False)
    said |= keys | dict(draft_vocab_size=50)
    assert {key: config[key] for key in said} == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"selector_top_k": None},
            'must say "selector_top_k", at its top or in dflash_config: a whole number of at least 2',
        ),
        ({"selector_top_k": 51}, "selector_top_k must be from 2 to 50, got 51"),
        ({"candidate_selector.successor_codebook": None}, "missing: candidate_selector.successor_codebook"),
        ({"layers.1.mlp_conv.base_kernel": None}, "missing: layers.1.mlp_conv.base_kernel"),
        ({"layers.0.attention_conv.base_kernel": torch.zeros(2, 24)}, "is (2, 24), expected three axes"),
        ({"layers.0.attention_conv.kernel_projection.weight": torch.zeros(20, 24)}, "has 20 rows, expected 2 x 2 taps"),
        (
            {"markov_head.markov_w1.weight": torch.zeros(50, 3)},
            "parts of DSpark (edge_rank, confidence) and of DFlash2",
        ),
    ],
)
def test_parts_of_dflash2_that_do_not_fit_are_named(changes, message):
    tensors, config = to_file(make(**DFLASH2), "dflash")
    for name, value in changes.items():
        held = tensors if "." in name else config["dflash_config"]
        held.pop(name, None) if value is None else held.update({name: value})
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(tensors, config)


def test_tensors_of_dflash2_decide():
    tensors, config = to_file(make(**DFLASH2), "dflash")
    config["dflash_config"] |= dict(conv_kernel_size=3, conv_group_size=16, selector_rank=256)
    _, reading = from_file(tensors, config)
    assert reading.config == make(**DFLASH2).config
    assert [note.split('"')[1] for note in reading.notes] == ["selector_rank", "conv_group_size", "conv_kernel_size"]
    plain, _ = to_file(make(), "dflash")
    _, reading = from_file(plain, config)
    assert reading.config == make().config


def as_specforge(config):
    """The keys of SpecForge's own configs: DSpark's in dflash_config alone, and none for the anchor."""
    config |= {
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {**config["dflash_config"], "attention_mode": "gqa"},
    }
    del config["dflash_config"]["sample_from_anchor"]
    return {key: value for key, value in config.items() if key not in config["dflash_config"]}


def as_deepspec(config):
    """Flat keys alone."""
    return {key: value for key, value in config.items() if key != "dflash_config"} | {"num_anchors": 512}


def test_published_dspark_files_are_read():
    head = random_head(**DSPARK)
    tensors, config = to_file(head, "dflash")
    _, reading = from_file(tensors, as_specforge(dict(config)))
    assert (reading.config, reading.format, reading.notes) == (head.config, "dflash", [])
    tables = {"embed_tokens.weight": torch.randn(50, 24), "lm_head.weight": torch.randn(50, 24)}
    _, reading = from_file(tensors | tables, as_deepspec(dict(config)))
    assert (reading.config, reading.format, reading.notes) == (
        make(**DSPARK, draft_vocab_size=50).config,
        "deepspec",
        [],
    )
    assert torch.equal(reading.state["lm_head.weight"], tables["lm_head.weight"])
    plain, config = to_file(make(sample_from_anchor=True), "dflash")  # DeepSpec's DFlash predicts from the anchor, too
    flat = as_deepspec(config | config["dflash_config"] | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0})
    del flat["sample_from_anchor"]
    _, reading = from_file(plain | tables, flat)
    assert (reading.config, reading.format) == (make(sample_from_anchor=True, draft_vocab_size=50).config, "deepspec")


def test_speculators_keys_are_the_library_s():
    head = random_head(**DSPARK)
    tensors, config = to_file(head, "speculators", torch.randn(50, 24))
    said = dict(speculators_model_type="dspark", architectures=["DSparkSpeculator"], block_size=5, mask_token_id=49)
    said |= dict(aux_hidden_state_layer_ids=[2, 4, 6], draft_vocab_size=50, target_hidden_size=24, markov_rank=3)
    said |= dict(sample_from_anchor=True, sliding_window_non_causal=False, markov_head_type="vanilla")
    assert {key: config[key] for key in said} == said
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["layer_types"]) == (
        "qwen3",
        2,
        ["full_attention"] * 2,
    )
    assert {"embed_tokens.weight", "lm_head.weight"} <= tensors.keys()
    plain = to_file(make(), "speculators", torch.randn(50, 24))[1]
    assert (plain["speculators_model_type"], plain["architectures"]) == ("dflash", ["DFlashSpeculator"])
    assert "markov_rank" not in plain


@pytest.mark.parametrize(
    ("kind", "tokens", "anchored", "notes"),
    [
        ("dspark", 6, True, 0),
        ("dspark", 5, False, 1),
        ("dflash", 5, False, 0),
        ("dspark", None, True, 0),
        ("dflash", None, False, 0),
    ],
)
def test_files_without_the_anchor_s_key_tell_it_by_their_tokens_or_kind(kind, tokens, anchored, notes):
    changes = DSPARK if kind == "dspark" else {}
    head = make(**changes | dict(sample_from_anchor=anchored, num_speculative_tokens=6 - (not anchored)))
    tensors, config = to_file(head, "speculators", torch.randn(50, 24))
    del config["sample_from_anchor"]
    config["speculators_config"]["proposal_methods"] = [{"speculative_tokens": tokens}] if tokens else []
    _, reading = from_file(tensors, config)
    assert (reading.config, len(reading.notes)) == (head.config, notes)


def test_the_verifier_s_tensors_are_left_out():
    tensors, config = to_file(make(), "speculators", torch.randn(50, 24))
    more = {"verifier_lm_head.weight": torch.zeros(50, 24), "verifier_norm.weight": torch.zeros(24)}
    _, reading = from_file(tensors | more, config)
    assert [note.split(" is ")[0] for note in reading.notes] == [f"tensor {name}" for name in more]
    del config["transformer_layer_config"]["lm_head_is_targets"]  # a file of the library itself
    assert from_file(tensors, config)[1].config == make(draft_vocab_size=50).config


def test_newer_and_older_places_of_keys_are_read():
    tensors, config = file_of()
    kind, reading = from_file(tensors, config)
    assert (kind, reading.config, reading.notes) == (BlockHead, make().config, [])
    moved = config | {"dflash_config": config["dflash_config"] | {"block_size": 6, "causal": True}}
    del moved["block_size"]
    assert from_file(tensors, moved)[1].config == make(is_causal=True).config
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert from_file(prefixed, config)[1].config == make().config


def test_tensors_decide():
    tensors, config = file_of()
    _, reading = from_file(tensors, config | {"num_hidden_layers": 5, "intermediate_size": 41})
    assert reading.config == make().config
    assert [note.split(";")[0] for note in reading.notes] == [
        'config.json says "intermediate_size": 41',
        'config.json says "num_hidden_layers": 5',
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_size": None},
            '"block_size", at its top or in dflash_config: a whole number of at least 2; it says None',
        ),
        ({"block_size": 1}, "a whole number of at least 2; it says 1"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, 'config.json must say "mask_token_id"'),
        ({"dflash_config": {"mask_token_id": 49}}, 'must say "target_layer_ids" in dflash_config'),
        ({"dflash_config": [1]}, '"dflash_config": [1], expected an object'),
        (
            {"dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3]}},
            "has 72 columns, expected 48: target_layer_ids",
        ),
        ({"dflash_config": {"mask_token_id": 49, "target_layer_ids": [5, 3, 1]}}, "must be ascending layer numbers"),
        (
            {"dflash_config": {"mask_token_id": 50, "target_layer_ids": [1, 3, 5]}},
            "must be below the vocab_size 50, got 50",
        ),
        ({"is_causal": "no"}, "must say is_causal or dflash_config's causal, true or false"),
        (
            {"speculators_model_type": "eagle3"},
            '"speculators_model_type": \'eagle3\', expected one of "dflash", "dflash2", "dspark"',
        ),
        ({"speculators_model_type": "dflash"}, "expected transformer_layer_config with a Qwen3's keys"),
        ({"sample_from_anchor": 1}, '"sample_from_anchor": 1, expected true or false'),
        ({"markov_head_type": "gated"}, "\"markov_head_type\": 'gated'; only 'vanilla' is supported"),
        ({"logit_scale": 0.5}, '"logit_scale": 0.5; only 1.0 is supported'),
    ],
)
def test_keys_that_do_not_fit_are_named(changes, message):
    tensors, config = file_of()
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(tensors, config | changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("markov_head.gate_proj.weight", "markov_head.gate_proj.weight belongs to DSpark's gated edge"),
        ("markov_head.joint_proj.bias", "belongs to DSpark's recurrent edge"),
        ("markov_head.markov_w1.weight", "missing: markov_head.markov_w2.weight"),
        ("candidate_selector.hidden_projection.weight", 'must say "selector_top_k"'),
        ("layers.0.mlp_conv.base_kernel", "tensor layers.0.attention_conv.base_kernel is missing"),
        ("prefix_gru.weight_ih", "prefix_gru.weight_ih belongs to Domino's correction"),
        ("lm_head.weight", "missing: d2t; tensor lm_head.weight has 2 rows of a vocabulary of 50"),
        ("layers.1.self_attn.o_proj.bias", "unexpected: layers.1.self_attn.o_proj.bias"),
    ],
)
def test_tensors_of_other_members_are_named(name, message):
    tensors, config = file_of()
    with pytest.raises(ValueError, match=message):
        from_file(tensors | {name: torch.zeros(2, 2)}, config)


def test_missing_and_misshapen_tensors_are_named():
    tensors, config = file_of()
    without = {name: tensor for name, tensor in tensors.items() if name != "layers.1.self_attn.k_norm.weight"}
    with pytest.raises(ValueError, match=r"missing: layers\.1.self_attn.k_norm.weight"):
        from_file(without, config)
    with pytest.raises(ValueError, match=r"tensor norm.weight is \(3,\), expected \(24,\)"):
        from_file(tensors | {"norm.weight": torch.zeros(3)}, config)
