"""Targets with sliding windows and attention chunks: features of packed documents are those of each document alone."""

import pytest
import torch
import transformers
from transformers.integrations import flex_attention

from headstart.heads import packed_attention
from headstart.inference.models.layer_reach import Reach
from headstart.train.data.packed.packing import block_attention_mask, lay_out
from headstart.train.data.rows import rows_to_check
from headstart.train.teacher.feature_cache import describe
from headstart.train.teacher.features import FrozenTarget

REACH = 7  # positions of a window or chunk; most of the documents are longer
SHAPE = dict(vocab_size=61, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
SHAPE |= dict(intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2)
WINDOW, WIDE = SHAPE | {"sliding_window": REACH}, {"head_dim": 16}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "mistral": transformers.MistralConfig(**WINDOW),
    "phi3": transformers.Phi3Config(**WINDOW),
    "qwen2": transformers.Qwen2Config(**WINDOW, use_sliding_window=True, layer_types=MIXED),
    "gemma2": transformers.Gemma2Config(**WINDOW, **WIDE),
    "gemma3": transformers.Gemma3TextConfig(**WINDOW, **WIDE, layer_types=MIXED),
    "gpt-oss": transformers.GptOssConfig(**WINDOW, **WIDE, num_local_experts=4, num_experts_per_tok=2),
    "exaone4": transformers.Exaone4Config(**WINDOW, layer_types=MIXED),
    "olmo3": transformers.Olmo3Config(**WINDOW, layer_types=MIXED),
    "llama4": transformers.Llama4TextConfig(
        **SHAPE,
        **WIDE,
        attention_chunk_size=REACH,
        layer_types=["chunked_attention", "full_attention"] * 2,
        intermediate_size_mlp=48,
        num_local_experts=2,
    ),
}
DOCUMENTS = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (45, 1, 23, 5, 18)]
LAID_OUT = lay_out([(document.tolist(), [True] * len(document)) for document in DOCUMENTS], 60)
PACKED = LAID_OUT.select(slice(None))
ROWS = PACKED.input_ids, PACKED.position_ids, PACKED.document_ids


def make_target(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:  # large scores, so that a key too many shows
            torch.nn.init.normal_(parameter, std=0.25)
        elif "sinks" in name or "bias" in name:
            torch.nn.init.normal_(parameter)
    return FrozenTarget(model)


def errors(target, found):
    """Mean relative error of each document's features against those of the model on the document alone."""
    relative = []
    for i, document in enumerate(DOCUMENTS):
        alone = target.decoder(input_ids=document[None], use_cache=False).last_hidden_state[0]
        difference = (found[PACKED.document_ids == i] - alone).abs().mean() / alone.abs().mean()
        relative.append(difference.item())
    return relative


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_features_they_have_alone(family, attention):
    target = make_target(FAMILIES[family])
    if attention == "eager" or target.model._supports_sdpa:
        target.model.set_attn_implementation(attention)
    assert max(errors(target, target.features(*ROWS))) < 5e-6


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "exaone4", "llama4"])
def test_flex_attention_gives_them_the_same(family, monkeypatch):
    """Uncompiled, as it runs on the CPU, where the library refuses attention sinks (gpt-oss)."""
    uncompiled = lambda q, k, v, training, **given: flex_attention.flex_attention(q, k, v, **given)  # noqa: E731
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(packed_attention, "_compiled", lambda function: function)
    used, plain = [], flex_attention.flex_attention
    monkeypatch.setattr(flex_attention, "flex_attention", lambda *a, **b: (used.append(b), plain(*a, **b))[1])
    monkeypatch.setattr(FrozenTarget, "_takes_flex_attention", lambda self, device: True)
    target = make_target(FAMILIES[family])
    found = target.features(*ROWS)
    assert len(used) == 4
    assert len({id(given["block_mask"]) for given in used}) == (1 if family == "mistral" else 2)
    assert max(errors(target, found)) < 5e-6


def masks_of(target, monkeypatch):
    """The attention_mask that the decoder is given for ROWS."""
    given = []
    monkeypatch.setattr(target.decoder, "forward", lambda **named: given.append(named["attention_mask"]) or Last)
    target.features(*ROWS)
    return given[0]


class Last:
    last_hidden_state = torch.zeros(1)


def test_one_mask_is_built_where_no_document_meets_a_limit(monkeypatch):
    """The mask that targets without windows get, bit by bit, so nothing changes for them."""
    llama = masks_of(make_target(transformers.LlamaConfig(**SHAPE)), monkeypatch)
    assert llama.shape == (len(ROWS[0]), 1, 60, 60)
    assert torch.equal(llama == 0, block_attention_mask(ROWS[2]))
    for family in ("mistral", "gemma3"):
        config = FAMILIES[family].__class__.from_dict(FAMILIES[family].to_dict() | {"sliding_window": 60})
        assert torch.equal(masks_of(make_target(config), monkeypatch), llama)
    mixed = masks_of(make_target(FAMILIES["gemma3"]), monkeypatch)
    assert torch.equal(mixed["full_attention"], llama)
    assert not torch.equal(mixed["sliding_attention"], llama)


def test_stray_layer_types_of_a_config_that_does_not_declare_them_are_not_read():
    config = transformers.MistralConfig.from_dict(FAMILIES["mistral"].to_dict() | {"layer_types": MIXED})
    target = make_target(config)
    assert max(errors(target, target.features(*ROWS))) < 5e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 2),
            r"Lfm2ForCausalLM gives other features for a document of \d+ tokens in a packed row than alone .* \(every layer: all "
            r"tokens\): .*carry a state from one document to the next\. Take another target",
        ),
        (
            transformers.MiniMaxConfig(
                **WINDOW, num_local_experts=2, layer_types=["linear_attention", "full_attention"] * 2
            ),
            r"\(minimax\) has a sliding_window of 7 and an attention_chunk_size of None beside layers of linear_attention: .* "
            r"built for layers of full_attention, .*Take a target whose layers are of these types",
        ),
    ],
    ids=["state", "window beside another type"],
)
def test_targets_whose_masks_are_not_built_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_target(config).check(*rows_to_check(LAID_OUT, torch.device("cpu")))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt-oss", "exaone4", "llama4"])
def test_the_check_reads_the_longest_document(family):
    """Of the rows of many short documents alone, a target without its window passes, because no document is longer."""
    target = make_target(FAMILIES[family])
    lengths = (5, 6, 4, 5, 6, 4, 5, 30)
    documents = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    rows = rows_to_check(lay_out([(ids, [True] * len(ids)) for ids in documents], 36), torch.device("cpu"))
    target.check(*rows)
    target.reaches = {None: Reach()}  # as if the config said nothing
    (many,) = [row for row in range(len(rows[0])) if rows[2][row].amax() > rows[2][row, 0] + 3]
    target.check(*(part[many : many + 1] for part in rows))
    with pytest.raises(
        ValueError, match=r"document of 30 tokens in a packed row than alone .* \(every layer: all tokens\)"
    ):
        target.check(*rows)


def test_the_check_finds_documents_that_see_each_other(monkeypatch):
    target = make_target(FAMILIES["mistral"])
    features = target.features
    monkeypatch.setattr(
        target, "features", lambda ids, places, documents: features(ids, places, documents.clamp(max=0))
    )
    with pytest.raises(ValueError, match="other features for a document"):
        target.check(*rows_to_check(LAID_OUT, torch.device("cpu")))


def test_a_cache_made_without_windows_is_another_cache():
    target = make_target(FAMILIES["gemma3"])
    windows = describe(target, PACKED, torch.float32)["target"]
    target.reaches = {None: Reach()}
    assert describe(target, PACKED, torch.float32)["target"] != windows
    target.reaches = {None: Reach(window=60)}  # no document is longer: the features are the same
    whole = describe(target, PACKED, torch.float32)["target"]
    target.reaches = {None: Reach()}
    assert describe(target, PACKED, torch.float32)["target"] == whole
