"""Heads that were pushed, pulled back by their id: the same tokens, of every family; branches; without the network afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import LLM, SamplingParams
from headstart.heads.checkpoint import load_head, resolve_head, save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export import verify
from headstart.hub_export.export import main
from headstart.inference.models.adapter import find_adapter, find_adapter_of
from headstart.tests.hub_export.short_decoding import coded

ASSETS = Path(__file__).resolve().parents[2] / "assets"
V, PROMPTS = 97, [[5, 17, 80, 3], [9, 9, 61]]
FORMATS = ("medusa", "mlp-speculator", "eagle-sglang", "speculators")  # one of each family


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    tokens = dict(vocab_size=V, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(LlamaConfig(**shape, **tokens, max_position_embeddings=128, initializer_range=0.3)).eval()


def make_head(format, target, seed=1):
    """A random head of the format's family, so flat that some of its drafts are accepted and others not."""
    torch.manual_seed(seed)
    config = target.config
    if format == "medusa":
        head = Medusa(MedusaConfig(config.hidden_size, V, num_heads=3))
    elif format == "mlp-speculator":
        head = MLPSpeculator(MLPSpeculatorConfig(config.hidden_size, V, 24, 3))
    elif format == "eagle-sglang":
        head = Eagle(EagleConfig.for_target(config, fc_bias=True))
    else:
        head = Eagle3(Eagle3Config.for_target(config, aux_layer_ids=(0, 2, 4)))
    for parameter in head.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    if isinstance(head, Eagle | Eagle3):
        head.take_embedding(target.get_input_embeddings().weight)
        head.embedding_is_targets = False
    return head


def tokens_with(target, **speculative):
    """Tokens emitted by the rule "token". They depend on the drafts, so different heads give different tokens."""
    config = {"num_speculative_tokens": 3, "verifier": "token", "tree": "chain"} | speculative
    llm = LLM(target, max_num_seqs=2, speculative_config=config)
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=12) for seed in range(len(PROMPTS))]
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_pushed_head_generates_the_same_tokens(target, tmp_path, hub_here, format):
    save_head(make_head(format, target), tmp_path / "source")
    words = [str(tmp_path / "source"), "--format", format, "--output", str(tmp_path / "out"), "--push-to-hub", "me/it"]
    assert main(words) == 0
    local = tokens_with(target, model=str(tmp_path / "source"))
    fetched = [line for line in hub_here.requests if "/resolve/" in line]
    assert tokens_with(target, model="me/it") == local
    assert len([line for line in hub_here.requests if "/resolve/" in line]) > len(fetched)
    assert tokens_with(target, model=make_head(format, target, seed=2)) != local


def test_shards_are_fetched_all(target, tmp_path, hub_here, monkeypatch):
    head = make_head("mlp-speculator", target)
    save_head(head, tmp_path / "out", max_shard_size=10_000)
    (tmp_path / "out" / "README.md").write_text("---\nlicense: mit\n---\n# me/it\n")
    shards = sorted(path.name for path in (tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) >= 3
    assert main(["push", str(tmp_path / "out"), "me/it"]) == 0
    tokens = tokens_with(target, model="me/it")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert tokens == tokens_with(target, model=head) == tokens_with(target, model="me/it")


def test_a_revision_is_the_one_that_is_read(target, tmp_path, hub_here, monkeypatch):
    heads = {"main": make_head("medusa", target), "next/one": make_head("medusa", target, seed=2)}
    for branch, head in heads.items():
        folder = tmp_path / branch.replace("/", "-")
        save_head(head, folder / "head")
        options = [] if branch == "main" else ["--revision", branch]
        words = [str(folder / "head"), "--format", "medusa", "--output", str(folder / "out"), *options]
        assert main([*words, "--push-to-hub", "me/it"]) == 0
    card = (tmp_path / "next-one" / "out" / "README.md").read_text()
    assert "\n# it\n" in card
    assert '"model": "me/it@next/one"' in card
    ours = {branch: tokens_with(target, model=head) for branch, head in heads.items()}
    assert ours["main"] != ours["next/one"]
    assert tokens_with(target, model="me/it") == ours["main"]
    assert tokens_with(target, model="me/it", revision="next/one") == ours["next/one"]
    for _ in range(2):  # the second time without the network
        for name in ("next/one", hub_here.commit_of("me/it", "next/one"), "main"):
            for found in (f"me/it@{name}", verify._folder_of(f"me/it@{name}")):
                weight = load_head(found).heads[0].lm_head.weight
                assert torch.equal(weight, heads["main" if name == "main" else "next/one"].heads[0].lm_head.weight)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["me/it@next/one", "--format", "vllm", "--output", str(tmp_path / "vllm")]) == 0
    assert torch.equal(load_head(tmp_path / "vllm").heads[0].lm_head.weight, heads["next/one"].heads[0].lm_head.weight)


@pytest.mark.parametrize(
    ("speculative", "said"),
    [
        ({"model": "me/it", "revision": "gone"}, "no head at 'me/it@gone': .*RevisionNotFound"),
        (
            {"model": "me/it@main", "revision": "main"},
            r"\['revision'\] is of a head on the Hub .* is me/it@main: leave",
        ),
        ({"model": str(ASSETS), "revision": "main"}, r"\['revision'\] is of a head on the Hub"),
        ({"method": "ngram", "revision": "main"}, r"\['revision'\] is of a head on the Hub"),
        ({"model": "me/it", "revision": 3}, "must name a branch, tag or commit, got 3"),
        ({"model": "me/it@"}, "is not OWNER/NAME@REVISION"),
    ],
)
def test_a_revision_that_cannot_be_is_refused(target, hub_here, speculative, said):
    hub_here.repositories["me/it"] = {"private": False, "files": {}}
    with pytest.raises(ValueError, match=said):
        LLM(target, speculative_config=speculative)


def test_the_embedded_head_comes_back_with_its_tree_and_loads_without_network(tmp_path, hub_here, monkeypatch):
    """Pulled by a separate process, like a user's, which knows the Hub only by its environment."""
    words = [str(ASSETS / "stdlib-coder-medusa"), "--format", "medusa", "--output", str(tmp_path / "out")]
    assert main([*words, "--push-to-hub", "me/coder-heads", "--private"]) == 0
    script = (
        "import json, sys; from headstart.tests.hub_export.short_decoding import coded\n"
        "print(json.dumps(coded('me/coder-heads')))"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    ours = {"HF_ENDPOINT": hub_here.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_dummy"}
    ours["HF_HUB_CACHE"] = constants.HF_HUB_CACHE
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=kept | ours, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tokens, num_steps, num_nodes = told = json.loads(done.stdout.splitlines()[-1])
    assert told == coded(str(tmp_path / "out"))
    assert num_steps < len(tokens)  # drafts were accepted
    assert num_nodes == 8  # of the tree that lies beside the head
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    one, other = load_head("me/coder-heads"), load_head(tmp_path / "out")
    assert one.config == other.config
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one.parameters(), other.parameters()))
    assert resolve_head("me/coder-heads").joinpath("tree.json").is_file()


def test_an_adapter_comes_from_the_commit_that_its_head_came_from(hub_here, tmp_path):
    """A push to the branch between any two of the files changes nothing."""
    name = "me/it"
    save_head(Medusa(MedusaConfig(16, 33, num_heads=2, adapter="0" * 16)), tmp_path / "head")
    first = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    first |= {"adapter/adapter_config.json": b'{"made": 1}', "adapter/adapter_model.safetensors": b"first"}
    second = first | {"adapter/adapter_config.json": b'{"made": 2}', "adapter/adapter_model.safetensors": b"second"}
    hub_here.repositories[name] = {"private": False, "files": first, "branches": {"next": second}}

    folder = resolve_head(name)
    hub_here.repositories[name] |= {"files": second, "branches": {"old": first}}
    held = find_adapter_of(load_head(folder), name, folder)
    assert held == folder / "adapter"
    assert {path.read_bytes() for path in held.iterdir()} == {b'{"made": 1}', b"first"}
    # By itself: the config is asked for at the commit that the weights had.
    hub_here.requests.clear()
    held = find_adapter(name)
    assert {path.read_bytes() for path in held.iterdir()} == {b'{"made": 2}', b"second"}
    commit = hub_here.commit_of(name, "main")
    fetched = [line for line in hub_here.requests if "GET" in line and "/resolve/" in line]
    assert f"GET /{name}/resolve/main/adapter/adapter_model.safetensors" in fetched
    assert f"GET /{name}/resolve/{commit}/adapter/adapter_config.json" in fetched
