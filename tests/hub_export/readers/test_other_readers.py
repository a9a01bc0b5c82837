"""If the model card says that another project reads our files, that reader (other_readers.py) computes what the head computes; if
the card says that it does not, it stops or computes something else."""

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from headstart.heads.checkpoint import save_head
from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.families import FORMATS, check_format, family_of
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export.readers.readers import SGLANG, TGI, VLLM, files_as_written, judge
from headstart.tests.heads.test_eagle import SHAPE, H, V, one_document, randomize
from headstart.tests.hub_export.readers import other_readers as rules

T, S, DEPTH, HT, VD, INNER = 6, 3, 8, 20, 11, 18
MEDUSA, EAGLE, FMS = "the original Medusa code (FasterDecoding)", "the original EAGLE code", "fms-extras"
LIBRARY = "the `speculators` library"
PLAIN = SHAPE | dict(head_dim=4, base_model_name_or_path="some/target", num_speculative_tokens=S)  # heads x D is H
WIDE = PLAIN | dict(head_dim=10)
PUBLISHED = dict(target_hidden_size=H, draft_vocab_size=VD, aux_layer_ids=(2, 4, 5))

# family -> reader -> its rules; a reader without rules reads no head of the family.
RULES = {
    "Medusa": {MEDUSA: rules.original_medusa, TGI: rules.tgi, VLLM: rules.vllm_medusa},
    "MLP speculator": {FMS: rules.ibm_mlp_speculator, VLLM: rules.ibm_mlp_speculator, TGI: rules.tgi},
    "EAGLE": {VLLM: rules.vllm_eagle, SGLANG: rules.sglang_eagle, EAGLE: rules.original_eagle, TGI: rules.tgi},
    "EAGLE-3": {VLLM: rules.vllm_eagle3, SGLANG: rules.sglang_eagle3, EAGLE: rules.original_eagle3, TGI: rules.tgi}
    | {LIBRARY: rules.speculators_library},
}


def medusa(*shape):
    return lambda: Medusa(MedusaConfig(H, V, *shape, base_model_name_or_path="some/target"))


def mlp_speculator(**changes):
    return lambda: MLPSpeculator(MLPSpeculatorConfig(H, V, INNER, base_model_name_or_path="some/target", **changes))


def eagle(**changes):
    return lambda: Eagle(EagleConfig(**PLAIN | changes))


def eagle3(**changes):
    return lambda: Eagle3(Eagle3Config(**PLAIN | PUBLISHED | changes))


HEADS = {
    "five Medusa heads": medusa(5),
    "three Medusa heads": medusa(3),
    "Medusa heads of two blocks": medusa(5, 2),
    "Medusa heads that share the lm_head": medusa(3, 1, True),
    "two blocks and a shared lm_head": medusa(3, 2, True),
    "MLP speculator": mlp_speculator(tie_weights=False, scale_input=False),
    "tied MLP speculator": mlp_speculator(scale_input=False),
    "MLP speculator with scaled input": mlp_speculator(scale_input=True),
    "MLP speculator of one step": mlp_speculator(num_steps=1, tie_weights=False, scale_input=False),
    "tied MLP speculator of one step": mlp_speculator(num_steps=1, scale_input=False),
    "EAGLE": eagle(),
    "EAGLE with q, k, v biases": eagle(attention_bias=True),
    "EAGLE with fc.bias": eagle(fc_bias=True),
    "EAGLE with wide attention": eagle(head_dim=10),
    "EAGLE-3": eagle3(),
    "EAGLE-3 over the whole vocabulary": eagle3(draft_vocab_size=V),
    "EAGLE-3 of another width": eagle3(target_hidden_size=HT),
    "EAGLE-3 with norm_before_residual": eagle3(norm_before_residual=True),
    "EAGLE-3 with wide attention": eagle3(head_dim=10),
    "EAGLE-3 of other layers": eagle3(aux_layer_ids=(1, 3, 8)),
    "EAGLE-3 of two layers": eagle3(aux_layer_ids=(2, 5)),
    "EAGLE-3 with q, k, v biases": eagle3(attention_bias=True),
}


def formats_of(head):
    """The formats that can hold this head."""
    found = []
    for format in family_of(head).formats.FORMATS:
        with suppress(ValueError):
            check_format(head, format)
            found.append(format)
    return found


CASES = [(name, format) for name, make in HEADS.items() for format in formats_of(make())]


def built(name):
    """(a random head in fp64, a target that it fits, whose embedding EAGLE heads use)"""
    head = randomize(HEADS[name]())
    wide = head.config.target_hidden_size if isinstance(head, Eagle3) else H

    def draw(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)

    streams = [draw(T, wide).roll(layer) for layer in range(DEPTH + 1)]
    tokens = torch.randint(V, (T, S), generator=torch.Generator().manual_seed(7))
    target = rules.Target(draw(V, wide), draw(V, wide) / 4, streams, draw(T, wide) + 0.1, tokens)
    if isinstance(head, Eagle3) and head.d2t is not None:
        head.set_draft_vocabulary(*build_draft_vocabulary(torch.arange(V) % 7, VD))
    if isinstance(head, (Eagle, Eagle3)) and wide == H:
        head.take_embedding(target.embedding)
    return head, target


def written(head, target, format, folder):
    save_head(head, folder, format=format, torch_file=True, lm_head_weight=target.lm_head)
    return folder


def logits_of(head, target):
    """The head's own logits, depth by depth [T, V]."""
    family, tokens = family_of(head).name, target.tokens
    if family == "Medusa":
        return head(target.final, target.lm_head)[0]
    if family == "MLP speculator":
        return head(target.final, tokens)[0]
    document = one_document(T)
    if family == "EAGLE":
        return [head(target.final[None], tokens[None, :, 0], *document)[0] @ target.lm_head.T]
    features = torch.cat([target.streams[id] for id in head.features], -1)
    ids, found = head.draft_token_ids, []
    for state in head(features[None], tokens[None], *document, S):
        logits = torch.full((T, V), rules.ABSENT, dtype=torch.float64)
        found.append(logits.index_copy(1, torch.arange(V) if ids is None else ids, head.logits(state)[0]))
    return found


@torch.no_grad()
def verdict(read, folder, head, target):
    """ "takes", or the reason why not. For EAGLE heads the rules compute only the first depth."""
    try:
        found = read(folder, target)
    except rules.Refused as error:
        return f"stops: {error}"
    if found is None:
        return "serves without speculation"
    expected = logits_of(head, target)
    if len(found) != len(expected):
        return f"drafts {len(found)} deep instead of {len(expected)}"
    off = max(float((one - two).abs().max()) for one, two in zip(found, expected))
    return "takes" if off < 1e-4 else f"computes something else, off by {off:.2g}"


@pytest.mark.parametrize(("name", "format"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_readers_take_what_the_card_says(tmp_path, name, format):
    head, target = built(name)
    folder = written(head, target, format, tmp_path / "head")
    for said in judge(files_as_written(head, format, DEPTH)):
        read = RULES[family_of(head).name].get(said.reader)
        found = verdict(read, folder, head, target) if read else "has no such heads"
        assert (found == "takes") is (said.loads and not said.problems), f"{said}, but by its rules: {found}"


def edit(**keys):
    """Change config.json: a key with the value `...` is taken out, another one set; a dict changes what is inside."""

    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(_edited(json.loads(path.read_text()), keys)))

    return change


def _edited(config, keys):
    for key, value in keys.items():
        value = _edited(dict(config[key]), value) if isinstance(value, dict) and config.get(key) else value
        config = {name: one for name, one in config.items() if name != key} | ({} if value is ... else {key: value})
    return config


def rename(old, new=None):
    """Rename tensors, or leave them out."""

    def change(folder):
        path = folder / "model.safetensors"
        tensors = {
            name.replace(old, new or "", 1): one for name, one in load_file(path).items() if new or old not in name
        }
        save_file(tensors, path)

    return change


def add(name, *shape):
    """Put a tensor of zeros into the file."""

    def change(folder):
        path = folder / "model.safetensors"
        save_file(load_file(path) | {name: torch.zeros(shape)}, path)

    return change


def remove(name):
    return lambda folder: (folder / name).unlink()


ID = rules.IDS
# Parts of an export that exist only because some reader would otherwise fail, usually silently.
LOSSES = [
    ("five Medusa heads", "medusa", TGI, edit(architectures=["MedusaModel"]), "serves without speculation"),
    ("five Medusa heads", "medusa", TGI, edit(medusa_num_heads=2), "drafts 2 deep"),
    ("five Medusa heads", "medusa", TGI, edit(base_model_name_or_path=""), "no target to serve"),
    ("five Medusa heads", "medusa", TGI, remove("medusa_lm_head.safetensors"), "no medusa_lm_head.safetensors"),
    ("five Medusa heads", "medusa", MEDUSA, remove("medusa_lm_head.pt"), "no medusa_lm_head.pt"),
    ("five Medusa heads", "vllm", VLLM, edit(medusa_fc_bias=...), "something else"),
    ("five Medusa heads", "vllm", VLLM, edit(num_attention_heads=2), "drafts 2 deep"),
    ("Medusa heads of two blocks", "vllm", VLLM, edit(num_hidden_layers=1), "something else"),
    ("Medusa heads that share the lm_head", "vllm", VLLM, edit(original_lm_head=...), "something else"),
    ("MLP speculator", "mlp-speculator", TGI, edit(inner_dim=0), "something else"),
    ("MLP speculator", "mlp-speculator", TGI, edit(architectures=...), "stops"),
    ("MLP speculator", "mlp-speculator", VLLM, edit(top_k_tokens_per_head=[5, 4]), "another length"),
    ("MLP speculator with scaled input", "mlp-speculator", VLLM, edit(scale_input=...), "something else"),
    ("tied MLP speculator", "mlp-speculator", FMS, edit(tie_weights=...), "something else"),
    ("EAGLE", "eagle-vllm", VLLM, edit(bias=True), "something else"),
    ("EAGLE", "eagle-vllm", VLLM, add("fc.bias", H), "unknown name"),
    ("EAGLE", "eagle-vllm", VLLM, add("lm_head.weight", V, H), "unknown name"),
    ("EAGLE", "eagle-vllm", EAGLE, edit(bias=...), "something else"),
    ("EAGLE with q, k, v biases", "eagle-vllm", VLLM, edit(qkv_bias=...), "unknown name"),
    ("EAGLE", "eagle-sglang", SGLANG, rename("fc.bias"), "something else"),
    ("EAGLE", "eagle-sglang", SGLANG, edit(rope_theta=..., rope_parameters=...), "something else"),
    ("EAGLE", "eagle-vllm", VLLM, edit(rope_theta=...), "do not agree"),
    ("EAGLE with wide attention", "eagle-vllm", VLLM, edit(head_dim=...), "stops"),
    ("EAGLE-3 of other layers", "eagle3", VLLM, edit(**{ID: ...}), "something else"),
    ("EAGLE-3 of other layers", "eagle3", SGLANG, edit(eagle_config=...), "something else"),
    ("EAGLE-3 of other layers", "eagle3", SGLANG, edit(eagle_config={ID: [1, 3, 7]}), "something else"),
    ("EAGLE-3 over the whole vocabulary", "eagle3", SGLANG, edit(tie_word_embeddings=True), "something else"),
    ("EAGLE-3", "eagle3", SGLANG, rename("midlayer.", "layers.0."), "something else"),
    ("EAGLE-3", "eagle3", SGLANG, rename("d2t"), "something else"),
    ("EAGLE-3", "eagle3", VLLM, edit(target_hidden_size=None), "is null"),
    ("EAGLE-3", "eagle3", SGLANG, edit(target_hidden_size=None), "is null"),
    ("EAGLE-3", "eagle3", EAGLE, edit(target_hidden_size=H), "something else"),
    ("EAGLE-3 of another width", "eagle3", SGLANG, edit(target_hidden_size=...), "stops"),
    ("EAGLE-3", "speculators", VLLM, edit(norm_before_residual=...), "something else"),
    ("EAGLE-3 with norm_before_residual", "speculators", VLLM, edit(norm_before_residual=False), "something else"),
    ("EAGLE-3", "speculators", LIBRARY, edit(speculators_config={"verifier": {"name_or_path": ""}}), "no target"),
    ("EAGLE-3", "speculators", VLLM, edit(transformer_layer_config={"model_type": ...}), "no model_type"),
]


@pytest.mark.parametrize(
    ("name", "format", "reader", "change", "loss"), LOSSES, ids=[f"{n}-{loss[2]}" for n, loss in enumerate(LOSSES)]
)
def test_what_an_export_avoids_would_be_noticed(tmp_path, name, format, reader, change, loss):
    head, target = built(name)
    folder, read = written(head, target, format, tmp_path / "head"), RULES[family_of(head).name][reader]
    before = verdict(read, folder, head, target)
    change(folder)
    found = verdict(read, folder, head, target)
    assert loss in found, f"{before}, then {found}"
    assert before == "takes"


def test_the_document_names_every_format_and_no_other():
    text = Path(__file__).parents[3].joinpath("docs", "hub.md").read_text(encoding="utf-8")
    table = text.split("## Which engine reads what")[1].split("The names are")[0]
    assert set(re.findall(r"`([\w-]+)`", table)) == set(FORMATS)
    assert set(re.findall(r"--format ([\w-]+)", text)) <= set(FORMATS)


@pytest.mark.parametrize("format", ["eagle-vllm", "eagle-sglang", "eagle3", "speculators"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}])
def test_transformers_takes_the_layer_for_a_llama(tmp_path, format, scaling):
    """vLLM and SGLang read config.json through transformers; of the speculators layout its layer's part."""
    make = eagle if format.startswith("eagle-") else eagle3
    head = make(rope_scaling=scaling, head_dim=10)()
    save_head(head, tmp_path / "head", format=format)
    config = AutoConfig.for_model(**(said := rules.config_of(tmp_path / "head")).get("transformer_layer_config", said))
    expected = head.config.llama_config()
    assert config.model_type == "llama"
    keys = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("num_hidden_layers", "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters")
    assert {key: getattr(config, key) for key in keys} == {key: getattr(expected, key) for key in keys}
    if format != "speculators":
        from_folder = AutoConfig.from_pretrained(tmp_path / "head")
        assert from_folder.rope_parameters == expected.rope_parameters
        assert from_folder.architectures == said["architectures"]
