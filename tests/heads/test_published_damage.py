"""Errors name the damage of a published checkpoint: every tensor in four ways, its config and its index."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from headstart.heads.checkpoint import read_head
from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.families import from_file
from headstart.tests.heads.published import LAYOUTS
from headstart.tests.heads.published_eagle import COUNTS, IDS, VD, I
from headstart.tests.heads.test_eagle import H, V
from headstart.tests.heads.test_mlp_speculator import S
from headstart.tests.heads.test_published import E3, SWEPT, VM, E, M, P


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def keep(tensors):
    return None


def reading_of(name, change, keys=()):
    """The error of from_file for a layout with changed {name: tensor}, or None; and its notes."""
    tensors = dict(LAYOUTS[name].tensors)
    change(tensors)
    try:
        return None, from_file(tensors, LAYOUTS[name].config | dict(keys))[1].notes
    except ValueError as error:
        return str(error), ()


@pytest.mark.parametrize("name", SWEPT)
def test_every_missing_tensor_is_named(name):
    for lost in LAYOUTS[name].tensors:
        if not lost.endswith(("embed_tokens.weight", "fc.bias", "t2d")):  # which may be absent
            message, _ = reading_of(name, drop(lost))
            assert lost in (message or ""), (lost, message)


@pytest.mark.parametrize("name", SWEPT)
def test_every_wrong_shape_is_an_error(name):
    for key, tensor in LAYOUTS[name].tensors.items():
        message, notes = reading_of(name, put(key, torch.cat((tensor, tensor[-1:]))))
        # If only one tensor tells the vocabulary, its size counts.
        assert "expected" in (message or "") or any('"vocab_size"' in note for note in notes), (key, message)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", SWEPT)
def test_every_wrong_dtype_is_named(name, dtype):
    for key, tensor in LAYOUTS[name].tensors.items():
        message, _ = reading_of(name, put(key, tensor.to(dtype)))
        assert re.search(rf"{re.escape(key)} is .*, expected", message or ""), (key, message)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_too_many_is_named(name):
    message, _ = reading_of(name, put("an.extra.weight", torch.zeros(2)))
    assert "an.extra.weight" in message


def offsets(*changes):
    def change(tensors):
        tensors["d2t"] = tensors["d2t"].clone()
        for place, id in changes:
            tensors["d2t"][place] = id - place

    return change


UNUSED = int((~build_draft_vocabulary(COUNTS, VD)[1]).nonzero()[0])  # a token that is not in the draft vocabulary
SWAPPED = torch.tensor([1, -1] + [0] * (V - 2))
TIED = "MLP speculator, tied, repeated"
LAYER, MID = "layers.0.", "midlayer."
DAMAGE = [
    (
        M,
        drop("1.0.linear.bias", "1.0.linear.weight", "1.1.weight"),
        {},
        r"missing: 1\.0\.linear\.bias, .*, 1\.1\.weight$",
    ),
    (M, put("0.norm.weight", torch.zeros(H)), {}, r"do not fit; unexpected: 0\.norm\.weight$"),
    (M, put("2.1.weight", torch.zeros(V - 1, H)), {}, r"2\.1\.weight is \(36, 24\), expected \(37, 24\)"),
    (M, put("10000000.0.linear.weight", torch.zeros(H, H)), {}, "missing: .* more"),
    (VM, drop("lm_heads.1.weight", "lm_heads.2.weight"), {}, r"missing: lm_heads\.1\.weight, lm_heads\.2\.weight"),
    (VM, put("token_map", torch.arange(3)), {}, "token_map: .*expected lm_heads of the target's whole vocabulary"),
    (VM, keep, {"logit_scale": 0.5}, "logit_scale=0.5; only 1.0 is supported"),
    ("vLLM's Medusa, no biases", keep, {"medusa_fc_bias": True}, r"missing: blocks\.0\.layers\.0\.bias"),
    ("Medusa, shared lm_head", keep, {"vocab_size": "37"}, "must say the target's vocab_size; it says '37'"),
    (P, put("speculator.head.10000000.weight", torch.ones(1)), {}, "missing: .* more"),
    (P, drop("speculator.emb.0.weight"), {}, r"emb\.0\.weight is missing, expected two axes"),
    (
        *(P, put("speculator.proj.1.weight", torch.ones(S, S + 1)), {}),
        rf"proj\.1\.weight is \({S}, {S + 1}\), expected \({S}, {S}\)",
    ),
    (P, keep, {"tie_weights": "yes"}, "\"tie_weights\": 'yes', expected true or false"),
    (
        TIED,
        put("speculator.head.2.weight", torch.ones(2)),
        {},
        r"tied, but speculator\.head\.2\.weight is not .*head\.0",
    ),
    (
        *("MLP speculator, tied", put("speculator.emb.1.weight", torch.ones(2, S)), {}),
        r"tied, but speculator\.emb\.1\.weight is not speculator\.emb\.0",
    ),
    ("MLP speculator, tied", keep, {"n_predict": None}, 'must say "n_predict", from 1 to 64; it says None'),
    (E, drop("fc.weight"), {}, r"tensor fc\.weight is missing, expected two axes"),
    (E, put(LAYER + "input_layernorm.weight", torch.ones(H)), {}, r"unexpected: layers\.0\.input_layernorm\.weight$"),
    (E, put("lm_head.weight", torch.ones(V, H)), {}, r"unexpected: lm_head\.weight$"),
    (E, put(LAYER + "self_attn.o_proj.bias", torch.ones(H)), {}, r"unexpected: layers\.0\.self_attn\.o_proj\.bias$"),
    (E, put("fc.weight", torch.ones(H, 3 * H)), {}, r"fc\.weight is \(24, 72\), expected \(24, 48\)"),
    (E, put("fc.bias", torch.zeros(H + 1)), {}, r"fc\.bias is \(25,\), expected \(24,\)"),
    (E, put(LAYER + "self_attn.q_proj.bias", torch.ones(60)), {}, r"missing: .*k_proj\.bias, .*v_proj\.bias"),
    (
        E,
        put(LAYER + "mlp.up_proj.weight", torch.ones(I + 1, H)),
        {},
        r"up_proj\.weight is \(37, 24\), expected \(36, 24\)",
    ),
    (E, put(LAYER + "self_attn.k_proj.weight", torch.ones(25, H)), {}, "has 25 rows, expected a multiple of .* 10"),
    (
        E,
        keep,
        {"num_attention_heads": 5},
        r'"num_attention_heads": 5, the 60 rows of .*q_proj\.weight are 6 heads of 10',
    ),
    (E, keep, {"head_dim": None, "num_attention_heads": None}, 'must say "head_dim" or "num_attention_heads"'),
    (E, keep, {"head_dim": None, "num_key_value_heads": 3}, '"num_attention_heads": 6, .* are 15 heads of 4'),
    (E, keep, {"hidden_act": "gelu"}, '"hidden_act": \'gelu\', expected "silu"'),
    (E, keep, {"rope_parameters": {"rope_theta": 2.0}}, "rope_theta twice and differently: 2.0, 500.0"),
    (
        E,
        keep,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        r"scales rope twice and differently: .*4\.0.* and .*2\.0",
    ),
    (E, keep, {"rope_theta": "500"}, "\"rope_theta\": '500', expected a number"),
    (E, keep, {"partial_rotary_factor": 0.5}, '"partial_rotary_factor": 0.5; only 1.0 is supported'),
    (
        E,
        keep,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        '"partial_rotary_factor": 0.5; only 1.0 is supported',
    ),
    (
        E,
        keep,
        {
            "rope_scaling": {
                "type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": "x",
            }
        },
        "rope scaling .* is not complete",
    ),
    (E, keep, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic', expected one of default"),
    (
        E,
        keep,
        {"rope_scaling": {"type": "llama3", "factor": 2.0}},
        "rope scaling .* is not complete: .*low_freq_factor",
    ),
    (E, keep, {"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0, got 'small'"),
    (E, drop("embed_tokens.weight"), {"vocab_size": None}, 'must say "vocab_size"; it says None'),
    (E3, drop("d2t"), {}, r"missing: d2t; tensor lm_head\.weight has 11 rows of a vocabulary of 37"),
    (E3, put("fc.bias", torch.ones(H)), {}, r"unexpected: fc\.bias$"),
    (E3, put(LAYER + "hidden_norm.weight", torch.ones(H)), {}, r"unexpected: layers\.0\.hidden_norm\.weight$"),
    (
        *(E3, put(MID + "self_attn.v_proj.weight", torch.ones(8, H)), {}),
        r"v_proj\.weight is \(8, 24\), expected \(8, 48\)",
    ),
    (
        E3,
        put("d2t", torch.zeros(VD - 1, dtype=torch.int64)),
        {},
        r"d2t is torch\.int64 \(10,\), expected torch\.int64 \(11,\)",
    ),
    (E3, offsets((VD - 1, V)), {}, rf"d2t gives draft token {VD - 1} the id {V} .*, expected ids from 0 to {V - 1}"),
    (E3, offsets((0, -1)), {}, r"d2t gives draft token 0 the id -1 \(d2t holds offsets: 0 \+ -1\)"),
    (E3, offsets((3, 5), (4, 5)), {}, "d2t gives 2 ids more than once, expected distinct ones"),
    (E3, offsets((0, UNUSED)), {}, "t2d disagrees with d2t on 2 tokens: it says"),
    ("EAGLE-3, whole vocabulary listed", put("d2t", SWAPPED), {}, "d2t reorders the whole vocabulary, expected zeros"),
    (
        E3,
        keep,
        {"target_hidden_size": 20},
        r"fc\.weight has 72 columns, expected 60: the 3 aux layers of a file that names none",
    ),
    (E3, keep, {IDS: [1, 2]}, r"fc\.weight has 72 columns, expected 48: its 2 aux layers"),
    (E3, keep, {IDS: [1, 4, 9], "eagle_config": {IDS: [1, 4, 9]}}, r"one less: expected \[0, 3, 8\] there"),
    (E3, keep, {"eagle_config": "none"}, "\"eagle_config\": 'none', expected an object"),
    (E3, keep, {IDS: "1,2,3"}, "expected a list of layer numbers"),
    (E3, keep, {IDS: [4, 4, 9]}, r"aux_layer_ids must be ascending layer numbers, got \(4, 4, 9\)"),
    (E3, keep, {"norm_before_residual": "no"}, "norm_before_residual must be true or false, got 'no'"),
    (E3, keep, {"target_hidden_size": 36, IDS: [1, 2]}, r"missing: embed_tokens\.weight$"),
    (E3, keep, {"speculators_model_type": "eagle"}, '"speculators_model_type": \'eagle\', expected "eagle3"'),
    (E3, keep, {"speculators_model_type": "eagle3"}, "not a speculators config: expected transformer_layer_config"),
    ("speculators", keep, {"fc_norm": True}, '"fc_norm": True; only false is supported'),
    (E3, keep, {"norm_output": True}, '"norm_output": True; only false is supported'),
    (E3, keep, {"eagle_config": {"norm_before_fc": True}}, '"norm_before_fc": True; only false is supported'),
    (E3, keep, {"eagle_config": "x"}, "\"eagle_config\": 'x', expected an object"),
    (E3, keep, {"target_hidden_size": [24]}, r'"target_hidden_size": \[24\], expected a whole number'),
]


@pytest.mark.parametrize(("name", "change", "keys", "message"), DAMAGE)
def test_what_is_wrong_with_a_file_is_named(name, change, keys, message):
    found, _ = reading_of(name, change, keys)
    assert found is not None
    assert re.search(message, found), found


def test_a_qwen2_need_not_say_its_biases():
    assert reading_of("EAGLE of a Qwen2, not said", keep, {"model_type": "qwen2"}) == (None, [])


def test_names_of_a_family_that_are_no_words_say_nothing():
    for keys in ({"architectures": 3}, {"architectures": [["x"]], "model_type": ["medusa"]}):
        message, notes = reading_of("EAGLE, fc.bias against the key", keep, keys)
        assert message is None
        assert len(notes) == 1


def index_of(change):
    def edit(folder):
        path = next(folder.glob("*.index.json"))
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return edit


def first_place(index, shard):
    index["weight_map"][next(iter(index["weight_map"]))] = shard


SHARD = r"pytorch_model-00001-of-00003\.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "pytorch_model-00001-of-00003.bin").unlink(),
            rf"pytorch_model\.bin\.index\.json lists {SHARD}, which is missing",
        ),
        (lambda folder: (folder / "pytorch_model-00001-of-00003.bin").write_bytes(b"PK"), f"{SHARD} cannot be read"),
        (
            index_of(lambda index: index["weight_map"].update({"norm.bias": "pytorch_model-00001-of-00003.bin"})),
            rf"{SHARD} lacks norm\.bias, which pytorch_model\.bin\.index\.json says it holds",
        ),
        (
            index_of(lambda index: index["weight_map"].pop("d2t")),
            "holds d2t, which pytorch_model.bin.index.json does not list",
        ),
        (
            index_of(lambda index: first_place(index, "../other.bin")),
            r"lies in '\.\./other\.bin', expected a \.bin file beside it",
        ),
        (index_of(lambda index: first_place(index, 3)), r"lies in 3, expected a \.bin file"),
        (index_of(lambda index: index.pop("weight_map")), "is not an index of weight files: it has no weight_map"),
        (index_of(lambda index: index["weight_map"].clear()), "is not an index of weight files: it lists no tensor"),
        (
            lambda folder: (folder / "pytorch_model.bin.index.json").write_text("{"),
            "is not an index of weight files: Expecting",
        ),
    ],
)
def test_what_is_wrong_with_an_index_is_named(tmp_path, change, message):
    LAYOUTS["EAGLE-3, sharded"].write(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_head(tmp_path)


def test_tensors_of_different_dtypes_are_loaded_as_the_one_that_is_asked_for(tmp_path):
    save_file(LAYOUTS[M].tensors | {"0.1.weight": torch.zeros(V, H).half()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"dtypes \(0\.1\.weight float16, .* float32\): load them as one with dtype="):
        read_head(tmp_path)
    assert read_head(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
