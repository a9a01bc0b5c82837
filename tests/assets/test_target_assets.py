"""The embedded target that ships, and the script that made it."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.assets.make import make_stdlib_coder as target
from headstart.assets.make.target_corpus import CHAT_TEMPLATE, SPECIAL_TOKENS, encode
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.packed.packing import block_attention_mask, pack
from headstart.train.data.stdlib_pairs import body_key, is_heldout
from headstart.train.run.muon import orthogonalize

ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / "assets" / "stdlib-coder"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def heldout():
    return [json.loads(line) for line in (ASSET / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def test_weights_are_small_and_bfloat16():
    path = ASSET / "model.safetensors"
    assert path.stat().st_size <= 15 * 2**20
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
        assert {tensor.get_dtype() for tensor in tensors.values()} == {"BF16"}
        assert 6e6 < sum(math.prod(tensor.get_shape()) for tensor in tensors.values()) < 8e6
    assert "lm_head.weight" not in tensors  # tied


def test_tokenizer_has_three_special_tokens_and_adds_none(tokenizer):
    assert tuple(tokenizer.convert_ids_to_tokens([0, 1, 2])) == SPECIAL_TOKENS
    assert len(tokenizer) == 6144
    assert tokenizer.eos_token == tokenizer.pad_token == "<|end|>"
    assert tokenizer.bos_token is None
    text = "def f(x):\n        return 'é→' + x  # ok\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert not set(tokenizer(text)["input_ids"]) & {0, 1, 2}


def test_template_masks_the_assistants_text_and_its_end(tokenizer):
    assert tokenizer.chat_template == CHAT_TEMPLATE
    messages = [
        {"role": "user", "content": "Write f."},
        {"role": "assistant", "content": "def f(): ..."},
        {"role": "user", "content": "Write g."},
        {"role": "assistant", "content": "def g(): ..."},
    ]
    encoding = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    marked = [token for token, mark in zip(encoding["input_ids"], encoding["assistant_masks"]) if mark]
    assert tokenizer.decode(marked) == "def f(): ...<|end|>def g(): ...<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>Write f.<|assistant|>"


def test_training_encodes_pairs_as_the_template_does(tokenizer, stdlib_splits):
    pairs = stdlib_splits["heldout"]
    encoded = encode(tokenizer.backend_tokenizer, pairs)
    by_template = encode_conversations(tokenizer, [pair.conversation() for pair in pairs])
    assert [(ids.tolist(), marks.tolist()) for ids, marks in encoded] == by_template


def test_heldout_prompts_are_of_heldout_modules_and_unseen_here(tokenizer, heldout, stdlib_splits):
    assert len(heldout) >= 200
    assert all(is_heldout(line["module"]) for line in heldout)
    training = {body_key(pair.answer) for pair in stdlib_splits["train"]}
    assert not any(body_key(line["messages"][1]["content"]) in training for line in heldout)
    for line in heldout:
        assert [turn["role"] for turn in line["messages"]] == ["user", "assistant"]
        assert line["messages"][0]["content"].startswith("Write the Python function `")
        assert len(tokenizer.apply_chat_template(line["messages"][:1], add_generation_prompt=True)["input_ids"]) <= 200


# Bits per byte of every eighth held-out answer. All 427, six times the work, gave 0.6933, the card's figure.
EIGHTH_BITS = 0.7047


def test_shipped_weights_are_those_of_the_model_cards_figure(tokenizer, heldout):
    conversations = load_conversations(str(ASSET / "heldout.jsonl"))[::8]
    figures = json.loads((ASSET / "recipe.json").read_text())["figures"]["the standard library"]
    assert figures["num_functions"] == len(heldout)
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    rows = pack(encode_conversations(tokenizer, conversations), 1024)
    nats = 0.0
    with torch.no_grad():
        for ids, documents, supervised in zip(
            *(t.split(2) for t in (rows.input_ids, rows.document_ids, rows.supervised))
        ):
            losses = target.token_losses(model, ids, block_attention_mask(documents))
            nats += (losses * supervised[:, 1:]).sum().item()
    num_bytes = sum(len(messages[1]["content"].encode()) for messages in conversations)
    measured = nats / num_bytes / math.log(2)
    assert measured == pytest.approx(EIGHTH_BITS, abs=0.0003)
    assert f"| {figures['answer_bits_per_byte']:.3f} |" in (ASSET / "README.md").read_text()


TINY = {
    "device": "cpu", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
    "vocab_size": 512, "row_length": 128, "batch_rows": 8, "max_pairs": 1500, "warmup_steps": 5, "seconds": 60,
    "epochs": 0.2,
}  # fmt: skip


def tiny_arguments(output, **changes):
    settings = {**TINY, **changes}
    return ["--output", str(output), "--no-packages", *(f"--{name}={value}" for name, value in settings.items())]


@pytest.mark.slow
def test_script_learns_writes_a_loadable_model_and_never_overwrites(tmp_path, monkeypatch, capsys):
    output = tmp_path / "model"
    target.main(tiny_arguments(output))
    report = json.loads((output / "recipe.json").read_text())
    figures = report["figures"]["the standard library"]
    assert 1 < figures["answer_bits_per_byte"] < 4.5  # guessing among 512 tokens costs far more
    assert report["recipe"]["hidden_size"] == 32
    assert report["training"]["passes"] == pytest.approx(0.2, abs=0.05)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert re.search(
        r"\| Python standard library \| \d+\.\d+\.\d+\S* \| PSF-2\.0 \|", (output / "README.md").read_text()
    )
    assert load_conversations(str(output / "heldout.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="exists and is not empty"):
        target.main(tiny_arguments(output))


def test_too_little_source_is_told_and_leaves_nothing_behind(tmp_path, monkeypatch, stdlib_splits):
    pairs = stdlib_splits["train"][:100]
    monkeypatch.setattr("headstart.assets.make.target_corpus.stdlib_source_pairs", lambda further: pairs)
    with pytest.raises(ValueError, match=r"documented functions to train on.*at least 500"):
        target.main(tiny_arguments(tmp_path / "model"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_length": 100}, "row_length 100 must be a multiple of 128"),
        ({"optimizer": "sgd"}, "optimizer 'sgd' does not exist"),
        ({"decay": 1.5}, "decay is a share"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"vocab_size": 40000}, "vocab_size 40000"),
        ({"compare": "nowhere"}, "nowhere holds no recipe.json"),
    ],
)
def test_bad_settings_are_refused_before_any_work(tmp_path, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        target.main(tiny_arguments(tmp_path / "model", **change))
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_told_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the output .*model cannot be written: "):
        target.main(tiny_arguments(tmp_path / "file" / "model"))
    (tmp_path / "model.unfinished").mkdir()
    with pytest.raises(ValueError, match=r"model\.unfinished is left from a run that was killed"):
        target.main(tiny_arguments(tmp_path / "model"))


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit, match="0"):
        target.main(["--help"])
    shown = capsys.readouterr().out
    for field in fields(target.TargetRecipe):
        assert f"--{field.name}" in shown


def test_missing_gpu_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA GPU was found; --device cpu"):
        target.main(tiny_arguments(tmp_path / "model", device="cuda"))


def test_every_setting_is_read():
    code = "".join(
        (ROOT / "assets" / "make" / name).read_text() for name in ("make_stdlib_coder.py", "target_corpus.py")
    )
    for field in fields(target.TargetRecipe):
        assert re.search(rf"(recipe|self)\.{field.name}\b", code), field.name


def test_orthogonalized_matrices_have_singular_values_around_one():
    matrices = torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(0))
    for x in (matrices, matrices.mT):
        y = orthogonalize(x).float()
        values = torch.linalg.svdvals(y)
        assert y.shape == x.shape
        assert values.min() > 0.5
        assert values.max() < 1.3
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(y.flatten(1), (left @ right).flatten(1)).min() > 0.97
