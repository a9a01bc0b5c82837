"""headstart inspect: what it says of a head is so, what it finds wrong is wrong, and the command it names mends it."""

import json
import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import cli
from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export.export import main as export
from headstart.hub_export.inspect.inspect_head import describe
from headstart.hub_export.inspect.inspect_text import as_text
from headstart.hub_export.readers.readers import files_as_written, judge, readers_table

H, V, VD = 16, 66, 22
LAYER = dict(
    hidden_size=H, vocab_size=V, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4
)
LAYER |= dict(rope_theta=500.0, base_model_name_or_path="target")
EAGLE3 = LAYER | dict(target_hidden_size=H, draft_vocab_size=VD, aux_layer_ids=(1, 4, 6))


def medusa(num_heads=3, num_layers=1, shared=False):
    return random(Medusa(MedusaConfig(H, V, num_heads, num_layers, shared, "target")))


def mlp_speculator(**changes):
    return MLPSpeculator(replace(MLPSpeculatorConfig(H, V, 12, base_model_name_or_path="target"), **changes))


def untied():
    return mlp_speculator(tie_weights=False)


def eagle(**changes):
    head = random(Eagle(EagleConfig(**LAYER | changes)))
    head.take_embedding(torch.zeros(V, H))
    return head


def eagle3(**changes):
    head = random(Eagle3(Eagle3Config(**EAGLE3 | changes)))
    head.take_embedding(torch.zeros(head.config.vocab_size, H))
    return head


def random(head):
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data.normal_(generator=generator)
    return head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target of 12 layers that all heads fit, in bfloat16."""
    folder = tmp_path_factory.mktemp("target")
    shape = dict(vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=12, num_attention_heads=4)
    with torch.random.fork_rng():
        LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def beside_the_target(tmp_path, target, monkeypatch):
    """Paths are relative to a folder in which the target lies, as users type them."""
    (tmp_path / "target").symlink_to(target)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def inspect(capsys):
    """Run the command: (exit status, stdout, stderr)."""

    def run(*arguments):
        capsys.readouterr()
        status = cli.main(["inspect", *arguments])
        return status, *capsys.readouterr()

    return run


def found_in(folder):
    return describe(folder, Path(folder))


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def say(**keys):
    return lambda folder: edit_config(folder, lambda config: config.update(keys))


def leave_out(*keys):
    return lambda folder: edit_config(folder, lambda config: [config.pop(key) for key in keys])


def rewrite(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors")

    return spoil


def rename(old, new):
    return rewrite(lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()})


def remove(name):
    return lambda folder: (folder / name).unlink()


def engine_of(found, name):
    [engine] = [one for one in found["engines"] if one["name"].removeprefix("the ").startswith(name)]
    return engine


LAYER_SIZE = (4 + 2 + 2 + 4) * 4 * H + 3 * 24 * H + H  # q, k, v, o; the MLP; the norm between them
EAGLE3_LAYER = LAYER_SIZE + (4 + 2 + 2) * 4 * H + 2 * H  # q, k, v read twice the width; two more norms
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


# What is wrong with files: (head, format, change), which reader (None: config.json itself), whether it loads, and what is said.
SPOILED = {
    "fewer heads said": (medusa, "medusa", say(medusa_num_heads=2), "text-gen", True, "drafts the 2 heads"),
    "more heads said": (medusa, "medusa", say(medusa_num_heads=4), "text-gen", False, "looks for the 4 heads"),
    "no number said": (medusa, "medusa", say(medusa_num_heads="3"), "text-gen", False, "is '3', which is no number"),
    "no steps said": (
        lambda: mlp_speculator(tie_weights=False), "mlp-speculator", say(n_predict="3"), "fms", False, "no number of steps",
    ),
    "no size said": (eagle, "eagle-vllm", say(hidden_size="16"), "vLLM", False, "which says 16 of hidden_size"),
    "architectures": (medusa, "medusa", say(architectures=["X"]), "text-gen", False, "serves without speculation"),
    "no count": (medusa, "medusa", leave_out("medusa_num_heads"), "text-gen", False, "lacks medusa_num_heads"),
    "no target": (medusa, "medusa", leave_out("base_model_name_or_path"), "text-gen", False, "names no target"),
    "no .safetensors": (medusa, "medusa", remove("medusa_lm_head.safetensors"), "text-gen", False, "is not here"),
    "no .pt": (lambda: medusa(5), "medusa", remove("medusa_lm_head.pt"), "original", False, "is not here"),
    "no bias said": (medusa, "vllm", say(medusa_fc_bias=False), "vLLM", True, "drops every bias"),
    "a key for heads": (medusa, "vllm", say(num_attention_heads=8), "vLLM", True, "as many heads as config.json says (8)"),
    "one lm_head said": (medusa, "vllm", say(original_lm_head=True), "vLLM", True, "original_lm_head should be false"),
    "inner_dim 0": (
        lambda: mlp_speculator(inner_size=H, scale_input=False), "mlp-speculator", say(inner_dim=0), "text-gen", True,
        "weighs tokens by inner_dim 0",
    ),
    "no speculator": (
        lambda: mlp_speculator(scale_input=False), "mlp-speculator", leave_out("architectures"), "text-gen", False,
        "serves without speculation",
    ),
    "fc.bias of zeros": (eagle, "eagle-sglang", say(), "vLLM", False, "refuses fc.bias even if it is zero"),
    "no fc.bias": (eagle, "eagle-vllm", say(), "SGLang", False, "stays at random values"),
    "bias said": (eagle, "eagle-vllm", say(bias=True), "vLLM", True, "for a bias of the attention too"),
    "no bias key": (eagle, "eagle-vllm", leave_out("bias"), "original", False, "unless config.json says bias false"),
    "a prefix": (eagle, "eagle-vllm", rename("^", "model."), "vLLM", False, "whose names begin with 'model.'"),
    "layers.0": (eagle3, "eagle3", rename("midlayer.", "layers.0."), "SGLang", False, "draft from random values"),
    "outer ids only": (eagle3, "eagle3", leave_out("eagle_config"), "SGLang", True, "not in eagle_config"),
    "inner ids only": (
        eagle3, "eagle3", leave_out("eagle_aux_hidden_state_layer_ids"), "vLLM", True, "or [0, 3, 5] of eagle_config",
    ),
    "tied": (eagle3, "eagle3", say(tie_word_embeddings=True), "SGLang", True, "embedding in the place of lm_head"),
    "null": (eagle3, "eagle3", say(target_hidden_size=None), "vLLM", False, "target_hidden_size is null"),
    "no draft size": (eagle3, "eagle3", leave_out("draft_vocab_size"), "SGLang", False, f"an lm_head of {V} rows"),
    "new rope only": (eagle3, "eagle3", leave_out("rope_theta"), "vLLM", True, "on transformers 4"),
    "other sizes": (eagle3, "eagle3", say(intermediate_size=8), "vLLM", False, "which says 8 of intermediate_size"),
    "heads in words": (medusa, "medusa", say(medusa_num_heads="three"), "text-gen", False, "medusa_num_heads is 'three'"),
    "steps in words": (untied, "mlp-speculator", say(n_predict="three"), "vLLM", False, "n_predict is 'three'"),
    "size in words": (eagle, "eagle-vllm", say(hidden_size="wide"), "vLLM", False, "says wide of hidden_size"),
    "type in a list": (eagle, "eagle-vllm", say(model_type=["llama"], architectures=[]), "vLLM", False, "it wants"),
    "blocks said": (medusa, "medusa", say(medusa_num_layers=2), "text-gen", False, "as many blocks per head"),
    "not Medusa": (medusa, "vllm", say(architectures=["X"]), "vLLM", False, 'must say "model_type": "medusa"'),
    "a hidden size": (medusa, "vllm", say(hidden_size=8), "vLLM", False, "builds hidden_size 8"),
    "truncated": (medusa, "vllm", say(truncated_vocab_size=7), "vLLM", False, "needs a token_map"),
    "no type": (
        lambda: mlp_speculator(scale_input=False), "mlp-speculator", leave_out("model_type"), "text-gen", False,
        'must say "model_type": "mlp_speculator"',
    ),
    "no inner_dim": (
        lambda: mlp_speculator(inner_size=H, scale_input=False), "mlp-speculator", leave_out("inner_dim"), "text-gen",
        False, "lacks inner_dim",
    ),
    "fewer steps said": (
        lambda: mlp_speculator(tie_weights=False), "mlp-speculator", say(n_predict=2), "fms", True, "drafts 2 steps",
    ),
    "a width": (mlp_speculator, "mlp-speculator", say(emb_dim=8), "fms", False, "builds emb_dim 8"),
    "no qkv_bias": (
        lambda: eagle(attention_bias=True), "eagle-vllm", leave_out("qkv_bias"), "vLLM", False, "refuses the biases",
    ),
    "other architectures": (eagle3, "eagle3", say(architectures=["X"]), "vLLM", False, 'it wants "architectures"'),
    "other architectures there": (
        eagle3, "eagle3", say(architectures=["X"]), "SGLang", False, 'it wants "architectures"',
    ),
    "no fc": (
        eagle3, "eagle3", say(eagle_config={"use_aux_hidden_state": False}), "vLLM", False, "it builds no fc",
    ),
    "no speculators": (eagle3, "eagle3", say(), "speculators", False, "reads the format speculators"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_for_a_reader_is_said_and_mended_by_the_command(tmp_path, case):
    head, format, change, reader, loads, said = SPOILED[case]
    save_head(head(), tmp_path / "head", format=format, torch_file=True)
    change(tmp_path / "head")
    found = found_in("head")
    engine = engine_of(found, reader)
    assert engine["loads"] is loads
    assert any(said in problem for problem in engine["problems"]), engine["problems"]
    assert engine["mend"] in as_text(found)
    command, *arguments = shlex.split(engine["mend"].replace("OWNER/NAME", "target").replace("DIR", "mended"))
    assert command == "heads.export"
    with warnings.catch_warnings(action="ignore"):  # of what the config says wrong
        assert export(arguments) == 0
    engine = engine_of(found_in("mended"), reader)
    assert (engine["loads"], engine["problems"]) == (True, [])


# What no format mends.
INHERENT = {
    "blocks": (lambda: medusa(3, 2, True), "medusa-shared", "text-gen", False, "one residual block per head"),
    "own blocks": (lambda: medusa(5, 2), "medusa", "original", True, "repeats one residual block 2 times"),
    "five heads": (medusa, "medusa", "original", True, "builds 5 heads whatever the config says: these are 3"),
    "scale_input": (mlp_speculator, "mlp-speculator", "text-gen", True, "takes no notice of scale_input"),
    "fc.bias": (lambda: eagle(fc_bias=True), "eagle-sglang", "vLLM", False, "this head's has one"),
    "wide": (lambda: eagle(head_dim=10), "eagle-vllm", "original", False, "no heads that are not the hidden size"),
    "one step": (lambda: mlp_speculator(num_steps=1), "mlp-speculator", "vLLM", False, "wants two projections"),
    "residual": (lambda: eagle3(norm_before_residual=True), "speculators", "SGLang", False, "norm_before_residual"),
    "layers": (lambda: eagle3(aux_layer_ids=(1, 2, 3, 4)), "eagle3", "vLLM", False, "this head reads 4"),
    "biases": (lambda: eagle3(attention_bias=True), "eagle3", "SGLang", False, "no biases of q, k and v"),
    "family": (eagle, "eagle-vllm", "text-gen", False, "no EAGLE support"),
}


@pytest.mark.parametrize("case", INHERENT)
def test_what_lies_in_the_head_is_said_without_a_command(tmp_path, case):
    head, format, reader, loads, said = INHERENT[case]
    save_head(head(), tmp_path / "head", format=format, torch_file=True)
    engine = engine_of(found_in("head"), reader)
    assert (engine["loads"], engine["mend"]) == (loads, None)
    assert any(said in problem for problem in engine["problems"] or [engine["how"]])
    [row] = [text for name, text in readers_table(load_head("head"), format) if reader in name]
    assert said in row.replace("`", "")


@pytest.mark.parametrize("format", [*FAMILIES, "vllm", "eagle-sglang"])
def test_a_card_judges_the_files_that_are_written(tmp_path, format):
    head = {"vllm": lambda: medusa(3, 2, True), "eagle-sglang": eagle}.get(format, FAMILIES.get(format, [None])[0])()
    save_head(head, tmp_path / "head", format=format, torch_file=True, lm_head_weight=torch.zeros(V, H))
    written = files_as_written(head, format)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert written.files == {path.name for path in (tmp_path / "head").iterdir()}
    assert written.tensors == load_file(next((tmp_path / "head").glob("*.safetensors"))).keys()
    assert {key: config[key] for key in written.config} == written.config
    assert judge(written) == judge(replace(written, config=config))
    assert any(verdict.loads for verdict in judge(written))


def test_a_command_can_be_copied_whatever_the_folder_is_called(tmp_path):
    save_head(medusa(5), tmp_path / "my heads" / "head")
    mend = engine_of(found_in("my heads/head"), "vLLM")["mend"]
    assert shlex.split(mend)[1] == "my heads/head"


def test_what_the_config_says_wrong_comes_first(inspect, tmp_path):
    save_head(medusa(5), tmp_path / "head")
    say(medusa_num_heads=2)(tmp_path / "head")
    first, _, title, lie, mend, *_ = inspect("head")[1].splitlines()
    assert first == "head: Medusa, 5 heads of 1 block"
    assert (title, "medusa_num_heads" in lie) == ("wrong", True)
    assert mend.endswith(": heads.export head --format medusa --output DIR")


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
    """As --help tells scripts: the status is of the head, not of the engines or the target."""
    save_head(medusa(5), tmp_path / "head", format="vllm")
    leave_out("medusa_fc_bias")(tmp_path / "head")
    status, text, _ = inspect("head", "--model", "target", "--json")
    found = json.loads(text)
    vllm = next(one for one in found["engines"] if one["name"] == "vLLM")
    assert (status, vllm["loads"], bool(vllm["silent"]), found["target"]["fits"]) == (0, True, True, True)
    with pytest.raises(SystemExit):
        inspect("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "0 where the head could be described, whatever is said of its config, its target and the engines" in told
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
    # A head that carries its target's config is one all the same.
    save_head(eagle(), tmp_path / "head")
    say(num_hidden_layers=12)(tmp_path / "head")
    status, text, _ = inspect("head")
    assert (status, '"num_hidden_layers": 12' in text) == (0, True)


def test_heads_and_models_of_the_hub(inspect, tmp_path, hub_here):
    """A repository's files count, not only those that were fetched; of a model only the config is."""
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
