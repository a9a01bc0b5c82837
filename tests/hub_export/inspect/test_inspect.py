"""headstart inspect: its statements on a head, its target and its figures are right, and it recognises anything but a whole head.

Its verdicts on engines: test_engine_verdicts.py.
"""

import json

import pytest
import torch

from headstart.heads.checkpoint import save_head
from headstart.tests.hub_export.inspect.small_heads import (
    VD,
    H,
    V,
    block,
    eagle,
    eagle3,
    edit_config,
    leave_out,
    medusa,
    mlp_speculator,
    rewrite,
    say,
)

LAYER_SIZE = (4 + 2 + 2 + 4) * 4 * H + 3 * 24 * H + H  # q, k, v, o; the MLP; the norm between them
EAGLE3_LAYER = LAYER_SIZE + (4 + 2 + 2) * 4 * H + 2 * H  # q, k, v read twice the width; two more norms
BLOCK_LAYERS = 2 * (LAYER_SIZE + H + 2 * 4)  # one more norm, and those of q and k
LM_HEAD = V * H
# head, its format, lines it must say, numbers of (trained, carried), bytes in float32 but for the target's lm_head in bfloat16
FAMILIES = {
    "medusa": (
        lambda: medusa(5),
        ["Medusa, 5 heads of 1 block", "last hidden state", "own, one per head"],
        (5 * (H * H + H + LM_HEAD), 0),
        {"first": 4 * 5 * (H * H + H + LM_HEAD), "target_lm_head": 0},
    ),
    "medusa-shared": (
        lambda: medusa(3, 2, True),
        ["Medusa, 3 heads of 2 blocks", "lm_head     the target's"],
        (6 * (H * H + H), 0),
        {"first": 4 * 6 * (H * H + H) + 2 * LM_HEAD, "target_lm_head": 2 * LM_HEAD},
    ),
    "mlp-speculator": (
        mlp_speculator,
        ["MLP speculator, 3 steps, weights tied", "inner 12, scale_input true", "embedding: own, one for all steps"],
        (2 * 12 * V + 12 * H + 12 * 12 + 2 * 12, 0),
        {
            "first": 4 * (12 * V + 12 * H + 2 * 12),
            "level": 4 * (12 * V + 12 * 12 + 2 * 12),
            "target_lm_head": 0,
        },
    ),
    "eagle-vllm": (
        eagle,
        ["EAGLE head", "4 heads over 2 of 4, rope 500", "the target's; embedding: the target's, not in the file"],
        (2 * H * H + LAYER_SIZE, 0),
        {
            "first": 2 * LM_HEAD,
            "level": 4 * (2 * H * H + LAYER_SIZE) + 2 * LM_HEAD,
            "advance": 4 * (2 * H * H + LAYER_SIZE),
            "target_lm_head": 2 * LM_HEAD,
        },
    ),
    "eagle3": (
        eagle3,
        ["EAGLE-3 head", f"{VD} of it drafted", "the target's layers 1, 4, 6 (vLLM", "SGLang: 0, 3, 5)"],
        (3 * H * H + EAGLE3_LAYER + H + VD * H, 0),
        {
            "first": 4 * (H + VD * H),
            "level": 4 * (EAGLE3_LAYER + H + VD * H),
            "advance": 4 * (3 * H * H + EAGLE3_LAYER),
            "target_lm_head": 0,
        },
    ),
    "dflash": (
        block,
        ["DFlash block drafter, 2 layer(s)", "layers 1, 4, 6", "all 7 depths at once, after a step", "not in the file"],
        (3 * H * H + 2 * H + BLOCK_LAYERS, 0),
        {
            "first": 4 * (BLOCK_LAYERS + H) + 2 * LM_HEAD,
            "advance": 4 * (3 * H * H + 2 * 2 * 2 * 4 * H),
            "target_lm_head": 2 * LM_HEAD,
        },
    ),
    "speculators": (
        lambda: eagle3(norm_before_residual=True),
        ["EAGLE-3 head", "norm_before_residual", "of the target's carried along"],
        (3 * H * H + EAGLE3_LAYER + H + VD * H, LM_HEAD),
        {
            "first": 4 * (H + VD * H),
            "level": 4 * (EAGLE3_LAYER + H + VD * H),
            "advance": 4 * (3 * H * H + EAGLE3_LAYER),
            "target_lm_head": 0,
        },
    ),
}


@pytest.mark.parametrize("format", FAMILIES)
def test_every_family_is_described(inspect, tmp_path, format):
    head, said, parameters, num_bytes = FAMILIES[format]
    save_head(head(), tmp_path / "run" / "head")
    (tmp_path / "run" / "acceptance.json").write_text('{"acceptance_length": 2.345, "per_position": [0.75, 0.5]}')
    (tmp_path / "run" / "tree.json").write_text('{"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]}')
    status, text, _ = inspect("run")
    assert status == 0
    facts = [
        "target: it fits",
        f"{format}, float32",
        "acceptance length 2.35 at temperature 0 (per position 0.75, 0.50)",
    ]
    for one in (
        *said,
        *facts,
        "static, 4 nodes, 2 deep",
        f"{parameters[0]:,} trained",
        "Headstart                   yes",
    ):
        assert one in text
    assert text.count("\n") < 40
    assert "wrong" not in text
    status, text, _ = inspect("run", "--json")
    found = json.loads(text)
    assert (found["problems"], found["target"]["fits"]) == ([], True)
    assert (found["parameters"]["trained"], found["parameters"]["carried"]) == parameters
    assert found["draft_bytes"] == num_bytes


def test_a_tree_of_another_head_of_the_run_is_said_to_be_left_out(inspect, tmp_path):
    save_head(block(), tmp_path / "run" / "best")
    save_head(block(edge_rank=3), tmp_path / "run" / "head")
    (tmp_path / "run" / "best" / "acceptance.json").write_text(
        '{"step": 2, "acceptance_length": 2.5, "per_position": [0.5]}'
    )
    (tmp_path / "run" / "tree.json").write_text('{"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]}')
    said = f"{(tmp_path / 'run' / 'tree.json').resolve()}: measured on other weights of that run"
    for name, other in (("run", False), ("run/best", False), ("run/head", True)):
        status, text, _ = inspect(name)
        assert status == 0
        assert (said in " ".join(text.split()), "static, 4 nodes" in text) == (other, not other), name
        assert bool(json.loads(inspect(name, "--json")[1])["left_out"]) == other
    assert "none beside it" in text


def test_a_block_drafter_with_an_edge_is_described(inspect, tmp_path):
    save_head(block(edge_rank=3, sample_from_anchor=True, confidence=True, draft_vocab_size=VD), tmp_path / "head")
    status, text, _ = inspect("head")
    said = ("DSpark block drafter, 2 layer(s)", f"{VD} of it drafted", "sample_from_anchor,", "edge of rank 3")
    passes = "! z-lab's code: it passes over the edge", f"a level reads {4 * 3 * VD} bytes of weights, the first"
    assert status == 0
    assert [one for one in (*said, *passes) if one not in text] == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_causal_block_drafter_needs_the_key_that_z_lab_s_code_reads(inspect, tmp_path, nested):
    save_head(block(is_causal=True), tmp_path / "head")
    if nested:
        edit_config(tmp_path / "head", lambda config: config["dflash_config"].update(causal=config.pop("is_causal")))
    status, text, _ = inspect("head")
    text = " ".join(text.split())
    assert (status, "versions before 2026-08 let a slot see its whole block" in text) == (0, True)
    assert (
        "! z-lab's code: it reads is_causal at the top of config.json, and no causal in dflash_config" in text
    ) == nested


def test_parts_of_dflash2_are_described(inspect, tmp_path):
    save_head(block(selector_rank=3, conv_kernel_size=2, conv_group_size=4), tmp_path / "head")
    status, text, _ = inspect("head")
    said = ("DFlash2 block drafter, 2 layer(s)", "selector of rank 3 among 16 tokens")
    said += ("convolutions over 2 slots", "all 7 depths at once")
    said += ("versions before 2026-08 know no DFlash2",)
    assert status == 0
    assert [one for one in said if one not in " ".join(text.split())] == []


@pytest.mark.parametrize("parts", [{}, dict(selector_rank=3, conv_kernel_size=2, conv_group_size=4)])
def test_scales_are_told_to_readers_that_know_none(inspect, tmp_path, parts):
    scales = dict(output_multiplier=0.25, final_logit_softcapping=20.0, input_embedding_scale=2.0)
    save_head(block(**parts, **scales), tmp_path / "head")
    status, text, _ = inspect("head")
    text, said = " ".join(text.split()), "has logits times 0.25, logits capped at 20, embeddings times 2"
    assert status == 0
    assert f"versions before 2026-08 scale and cap nothing, and this head {said}" in text
    assert f"whether it scales and caps was not checked: this head {said}" in text
    assert (f"it scales and caps for DFlash2 alone, and this head {said}" in text) == (not parts)


def test_a_head_of_another_target_is_said_not_to_fit(inspect, tmp_path):
    save_head(eagle3(vocab_size=V + 1, base_model_name_or_path=""), tmp_path / "head")
    status, text, _ = inspect("head")
    assert (status, "the head names none: give --model" in text) == (0, True)
    status, text, _ = inspect("head", "--model", "target")
    assert status == 0
    assert f"it has vocabulary {V + 1}, the target has {V}" in text.split("format ")[0]
    assert "IT DOES NOT FIT" in text
    status, text, _ = inspect("head", "--model", "some/where")
    assert (status, "some/where: not checked" in text) == (0, True)


def test_a_draft_vocabulary_without_the_targets_stop_token_is_said(inspect, tmp_path):
    head = eagle3()
    save_head(head, tmp_path / "ends")
    kept = torch.arange(V) > 2  # the target's stop token is 2
    kept[VD + 3 :] = False
    head.set_draft_vocabulary(torch.full((VD,), 3), kept)
    save_head(head, tmp_path / "endless")
    for name, said in (("ends", False), ("endless", True)):
        status, text, _ = inspect(name)
        assert (status, "it fits" in text) == (0, True)
        before = " ".join(text.split("format ")[0].split())
        assert (f"the {VD} tokens that this head drafts hold none of those that end an answer (2)" in before) == said


def test_a_head_that_could_be_described_is_no_failure_and_json_says_the_rest(inspect, tmp_path, capsys):
    """As in --help: the exit status depends on the head, not on engines or target."""
    save_head(medusa(5), tmp_path / "head", format="vllm")
    leave_out("medusa_fc_bias")(tmp_path / "head")
    status, text, _ = inspect("head", "--model", "target", "--json")
    found = json.loads(text)
    vllm = next(one for one in found["engines"] if one["name"] == "vLLM")
    assert (status, vllm["loads"], bool(vllm["silent"]), found["target"]["fits"]) == (0, True, True, True)
    with pytest.raises(SystemExit):
        inspect("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "0 if the head could be described, whatever the findings on its config, its target and the engines" in told
    assert {"problems", "target", "engines"} <= found.keys()
    assert {"loads", "problems", "silent"} <= vllm.keys()


def test_layers_that_a_file_does_not_name_are_those_of_its_target(inspect, tmp_path):
    save_head(eagle3(aux_layer_ids=None), tmp_path / "head")
    assert "layers 2, 6, 9 (vLLM" in inspect("head")[1]
    leave_out("base_model_name_or_path")(tmp_path / "head")
    assert "layers 2, n//2, n-3 (the file names none" in inspect("head")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rewrite(lambda tensors: {name: one for name, one in tensors.items() if name != "fc.weight"}), "fc.weight"),
        (rewrite(lambda tensors: tensors | {"fc.weight": torch.zeros(H, 3 * H + 1)}), "fc.weight has 49 columns"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "cut short or damaged"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
    ],
)
def test_a_damaged_head_is_an_error_that_says_what_is_wrong(inspect, tmp_path, change, said):
    save_head(eagle3(), tmp_path / "head")
    change(tmp_path / "head")
    status, text, error = inspect("head")
    assert (status, text, error.count("\n")) == (1, "", 1)
    assert error.startswith("headstart inspect: error: head/")
    assert said in error
    status, text, _ = inspect("head", "--json")
    assert (status, said in json.loads(text)["error"]) == (1, True)


def test_broken_figures_beside_a_head_are_said_and_the_rest_is_told(inspect, tmp_path):
    save_head(medusa(), tmp_path / "run" / "head")
    (tmp_path / "run" / "acceptance.json").write_text("{")
    status, text, _ = inspect("run")
    assert (status, "acceptance.json cannot be read" in text, "3,984 trained" in text) == (0, True, True)


def test_a_model_is_told_from_a_head_without_reading_it(inspect, tmp_path):
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 80}))
    (tmp_path / "large" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    for source, layers in (("target", 12), ("large", 80)):
        status, _, error = inspect(source)
        assert (status, f"{source} is a model, not a head: " in error) == (2, True)
        assert f"LlamaForCausalLM with {layers} layers" in error
    status, _, error = inspect("nothing")
    assert (status, "no head at 'nothing'" in error) == (2, True)
    # A head with its target's config still counts as a head.
    save_head(eagle(), tmp_path / "head")
    say(num_hidden_layers=12)(tmp_path / "head")
    status, text, _ = inspect("head")
    assert (status, '"num_hidden_layers": 12' in text) == (0, True)


def test_heads_and_models_of_the_hub(inspect, tmp_path, hub_here):
    """All files of a repository count, not only fetched ones; of a model only the config is fetched."""
    save_head(medusa(5), tmp_path / "head", torch_file=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    model = {"config.json": (tmp_path / "target" / "config.json").read_bytes(), "model.safetensors": b"large"}
    hub_here.repositories["a/head"] = {"private": False, "files": files}
    hub_here.repositories["a/model"] = {"private": False, "files": model}
    status, text, _ = inspect("a/head")
    assert (status, text.splitlines()[0]) == (0, "a/head: Medusa, 5 heads of 1 block")
    assert "original Medusa code        yes" in text
    status, _, error = inspect("a/model")
    assert (status, "a/model is a model, not a head" in error) == (2, True)
    assert inspect("a/head@main")[0] == 0
    fetched = [request for request in hub_here.requests if request.startswith("GET") and "/resolve/" in request]
    assert sorted(one.rpartition("/")[2] for one in fetched) == ["config.json"] * 2 + ["medusa_lm_head.safetensors"]
