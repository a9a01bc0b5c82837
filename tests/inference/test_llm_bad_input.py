"""The public API: inputs that it refuses, before any work."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM

from headstart import LLM, SamplingParams
from headstart.heads.checkpoint import save_head
from headstart.heads.storage.keywords import reject_unknown
from headstart.inference.models.decoder import UnsupportedArchitecture
from headstart.inference.models.shapes import config_of
from headstart.train.run.run_recipe import RunRecipe

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_a_model_with_an_adapter_is_refused(target_folder):
    from peft import LoraConfig

    module = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    module.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedArchitecture, match="merge adapters"):
        LLM(module)


def test_weights_cut_in_half_are_named(target_folder, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match="cut short"):
        LLM(str(folder))


def test_a_conversation_that_the_template_refuses_is_shown(target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    llm = LLM(str(target_folder), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"roles must alternate.*hello"):
        llm.chat([{"role": "user", "content": "hello"}])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="this tokenizer has none"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_chat_without_a_tokenizer_asks_for_one(target_folder):
    llm = LLM(AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"build the LLM with tokenizer="):
        llm.chat([{"role": "user", "content": "hello"}])


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "chat takes a conversation.*got 'hi'"),
        ([], "chat takes a conversation"),
        ([[USER], []], "chat takes a conversation"),
        (USER, "chat takes a conversation"),
        (["hi"], "message 0 of the conversation: a message is .*got 'hi'"),
        ([USER, {"content": "x"}], "message 1 of the conversation: a message is"),
        ([{"role": "user"}], "message 0 of the conversation: a message needs 'content'"),
        ([{"role": "user", "content": None}], "needs 'content'"),
        ([{"role": "boss", "content": "x"}], "unknown role 'boss': known are system, developer, user, assistant, tool"),
    ],
)
def test_bad_conversations_are_refused(llm, messages, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_model_length=5), "unknown LLM argument 'max_model_length'; did you mean 'max_model_len'"),
        (dict(zzz=5), r"^unknown LLM argument 'zzz'; the nearest of \d+ known ones are '"),
        (dict(tensorparallel=2), "unknown LLM argument 'tensorparallel'; did you mean 'tensor_parallel_size'"),
        (
            dict(tensor_parallel_size=3, device="cpu"),
            "tensor_parallel_size=3 does not divide the 4 query heads on 2 key .*1, 2, 4 would",
        ),
        (dict(tensor_parallel_size=0), "tensor_parallel_size must be a whole number of at least 1, got 0"),
        (dict(tensor_parallel_invariant=3), "tensor_parallel_invariant must be None or one of 2, 4, 8, got 3"),
        (dict(tensor_parallel_invariant=8, device="cpu"), "invariant=8 .*divide the 4 query heads .*give one of 2, 4"),
        (dict(quantization="awq"), "'quantization' is vLLM's"),
        (dict(speculative_config={"model": "HEAD", "parallel_drafting": True}), "'parallel_drafting' is vLLM's"),
        (dict(gpu_memory_utilization=True), "gpu_memory_utilization must be above 0 and at most 1, got True"),
        (dict(num_gpu_blocks_override=10**9), r"1000000000 pages of 64 tokens take .* GiB and .* GiB are free on cpu"),
        (dict(device="mps"), "device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        (dict(device=0), "device must be auto, cpu, cuda or cuda:N, got 0"),
        (dict(device="cuda:99"), "'cuda:99' was asked for, but"),
        (dict(max_model_len=257), "max_model_len must be from 2 to the model's own limit of 256"),
        (dict(max_num_seqs=0), "max_num_seqs"),
        (dict(dtype="int8"), "dtype must be auto, .* or float, got 'int8'$"),
        (dict(device="tpu"), "device must be"),
        (dict(seed=-1), "seed must be"),
        (dict(speculative_config={"num_speculative_tokens": 2}), "needs 'model'"),
        (
            dict(speculative_config={"model": "HEAD", "num_speculative_token": 2}),
            "did you mean 'num_speculative_tokens'",
        ),
        (dict(speculative_config={"model": "HEAD", "num_speculative_tokens": 4}), "from 1 to the head's 3, got 4"),
        (dict(speculative_config="HEAD"), "speculative_config must be a dict"),
        (dict(speculative_config={"model": None}), "needs 'model'"),
        (
            dict(speculative_config={"model": "HEAD", "tree": None}),
            "must be 'chain', 'static', 'dynamic' or a tree file",
        ),
        (dict(speculative_config={"model": "HEAD", "verifier": "lossy"}), "verifier must be one of strict"),
        (
            dict(speculative_config={"model": "HEAD", "tree": "/nowhere.json"}),
            "there is no tree file /nowhere.json: a tree is chain, static, dynamic, or a file that `headstart tree RUN` wrote",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(target_folder, head_folder, arguments, message):
    speculative = arguments.get("speculative_config")
    if isinstance(speculative, dict) and speculative.get("model") == "HEAD":
        arguments = {**arguments, "speculative_config": speculative | {"model": str(head_folder)}}
    with pytest.raises(ValueError, match=message):
        LLM(str(target_folder), **arguments)


def test_an_unknown_keyword_is_named_with_the_nearest_and_without_all_the_others():
    calls = {
        "'max_model_len'?": lambda: LLM("x", max_modellen=5),
        "'prompt_lookup_max'?": lambda: LLM("x", speculative_config={"method": "ngram", "prompt_lookupmax": 3}),
        "'max_tokens'?": lambda: SamplingParams(max_token=5),
        "nearest of": lambda: SamplingParams(temp=0.5),
        "known are prompt, prompt_token_ids": lambda: reject_unknown(
            {"text": 1}, ("prompt", "prompt_token_ids"), "key"
        ),
        "'row_length'?": lambda: reject_unknown({"rowlength": 1}, [f.name for f in fields(RunRecipe)], "key"),
        "leave it out": lambda: SamplingParams(extra_args={"a": 1}),
        "temperature=0.5": lambda: SamplingParams(0.5),
    }
    for hint, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(hint)) as error:
            call()
        assert len(str(error.value)) < 120


@pytest.mark.parametrize("model", [None, 3, "", " ", Path()])
def test_what_is_no_model_is_refused_without_asking_the_hub(model):
    expected = "config.json" if model == Path() else r"model must be a folder or Hub id"
    with pytest.raises(ValueError, match=expected):
        LLM(model)


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_module_that_writes_no_tokens_is_refused(target_folder, kind):
    module = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(target_folder))
    with pytest.raises(ValueError, match=rf"loaded \*ForCausalLM of transformers, got a {kind} module"):
        LLM(module)
    with pytest.raises(ValueError, match="got a Linear module"):
        LLM(torch.nn.Linear(2, 2))


def test_a_head_given_as_the_model_is_called_one(target_folder, head_folder, make_target_head, tmp_path):
    run = tmp_path / "run"
    save_head(make_target_head(), run / "head")
    save_head(make_target_head(), tmp_path / "vllm", format="vllm")
    for folder in (head_folder, run, tmp_path / "vllm"):
        with pytest.raises(ValueError, match=r"holds a head, not a target.*speculative_config"):
            LLM(str(folder))
    with pytest.raises(ValueError, match="that is a head"):
        LLM(make_target_head())
    # A target may keep its head beside it.
    both = shutil.copytree(target_folder, tmp_path / "both")
    save_head(make_target_head(), both / "head")
    assert LLM(str(both), dtype="float32").generate([[5, 6]], GREEDY)


def test_weights_beyond_the_free_memory_are_refused_before_any_is_made(monkeypatch):
    monkeypatch.setattr("headstart.inference.models.memory.free_bytes", lambda device: 20 << 30)
    monkeypatch.setattr("headstart.inference.models.weights._allocate", lambda *_: pytest.fail("a weight was made"))
    with pytest.raises(ValueError, match=r"the weights take 29\.9 GiB in float32 and 20\.0 GiB are free on cpu"):
        LLM(config_of("llama-3-8b"), load_format="dummy", device="cpu", dtype="float32", max_model_len=64)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no model folder \./no/such/model"):
        LLM("./no/such/model")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        LLM(str(tmp_path))
    with pytest.raises(ValueError, match="cannot read the model 'nobody/nothing'"):
        LLM("nobody/nothing")


def test_a_head_for_another_target_is_refused(target_folder, make_target_head, tmp_path):
    save_head(make_target_head(hidden_size=64), tmp_path / "wide")
    with pytest.raises(ValueError, match=r"64.*32|32.*64"):
        LLM(str(target_folder), speculative_config={"model": str(tmp_path / "wide")})
    save_head(make_target_head(vocab_size=300), tmp_path / "vocabulary")
    with pytest.raises(ValueError, match="300"):
        LLM(str(target_folder), speculative_config={"model": str(tmp_path / "vocabulary")})


def test_an_architecture_that_does_not_run_is_refused_by_what_is_in_the_way():
    model = BloomForCausalLM(BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=50))
    with pytest.raises(UnsupportedArchitecture, match="bloom models as they are: its base model takes no position_ids"):
        LLM(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(model_type="t5"), "'t5': transformers gives no module of it that generates text"),
        (
            dict(model_type="bloom", hidden_size=16, n_head=2),
            "bloom models as they are: its base model takes no position_ids",
        ),
        (
            dict(model_type="codegen", n_embd=64, n_head=4, rotary_dim=8),
            "not taken from transformers' interface: it uses matmul",
        ),
        (
            dict(model_type="gpt_oss", quantization_config=dict(quant_method="mxfp4")),
            r"quantised weights yet \(mxfp4\)",
        ),
        (dict(model_type="llama", quantization_config=dict(quant_method="fp8")), r"quantised weights yet \(fp8\)"),
        (
            dict(model_type="nobodys"),
            "model type 'nobodys': transformers .* does not know it, and .* brings no code of its own",
        ),
    ],
    ids=lambda given: given["model_type"] if isinstance(given, dict) else "",
)
def test_a_folder_that_cannot_run_is_refused_in_a_line_by_its_config_alone(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as refused:
        LLM(str(tmp_path), device="cpu")
    assert "\n" not in str(refused.value).strip()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 0 is empty"),
        ([[]], "prompt 0 is empty"),
        ([[5] * 256], "has 256 tokens; with max_model_len 256 at most 255 fit"),
        ([[5, 9999]], "token ids from 0 to 258"),
        ([[1], "", [2]], "prompt 1 is empty"),
        ({"prompt_tokens": [1]}, "did you mean 'prompt_token_ids'"),
        (7, "prompts must be"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(llm, prompt, message):
    before = llm.get_stats()
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY)
    assert llm.get_stats() == before
    assert not llm.engine.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(stop_token_ids=[5, 259]), "stop_token_ids of prompt 1 holds 259; the vocabulary has 259 tokens"),
        (dict(allowed_token_ids=[5, 700]), "allowed_token_ids of prompt 1 holds 700; the vocabulary has 259 tokens"),
        (dict(logit_bias={3: 1, 259: 1}), "logit_bias of prompt 1 holds 259; the vocabulary has 259 tokens"),
        (dict(bad_words=["a" * 17]), "bad_words holds 'aaaaaaaaaaaaaaaaa', which is 17 tokens long; at most 16"),
        (dict(bad_words=[f"{i:03d}" for i in range(129)]), "bad_words makes 129 sequences .*; at most 128"),
        (
            dict(allowed_token_ids=[64, 258], bad_words=["a"], min_tokens=1),
            r"allowed_token_ids \[64, 258\] of prompt 1 leaves nothing to draw",
        ),
    ],
)
def test_tokens_that_cannot_be_named_or_forbidden_are_refused_before_any_work(llm, given, message):
    assert llm.tokenizer("a")["input_ids"] == [64]
    assert set(llm.eos_token_ids) == {258}
    before = llm.get_stats()["num_requests_finished"]
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(**given)])
    assert llm.get_stats()["num_requests_finished"] == before
    assert not llm.engine.scheduler.has_unfinished


def test_bad_words_need_a_tokenizer(target_folder):
    llm = LLM(AutoModelForCausalLM.from_pretrained(target_folder))
    with pytest.raises(ValueError, match="bad_words strings of prompt 0 need a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(bad_words=["a"]))


def test_counts_of_prompts_and_parameters_must_agree(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="must be a SamplingParams"):
        llm.generate("x", [{"temperature": 0}])
    with pytest.raises(ValueError, match="must be a SamplingParams or a list of them, got float"):
        llm.generate("x", 0.5)
