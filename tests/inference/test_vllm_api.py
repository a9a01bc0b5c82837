"""Code written for vLLM's offline API: its example of speculative decoding, its metrics, its arguments."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from headstart import LLM, RequestOutput, SamplingParams
from headstart.heads.storage.keywords import ANY
from headstart.inference.engine.stopping import GrowingText, StopChecker
from headstart.inference.metrics import Counter, Gauge, Vector
from headstart.inference.models.target_source import named_dtype
from headstart.inference.vllm_api import LLM_ARGUMENTS, MISSING, SAMPLING
from headstart.inference.vllm_page import page, sections

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# As vLLM's examples/offline_inference/spec_decode.py goes about it: its arguments, its prompts, its loop over the metrics.
EXAMPLE = """
from headstart import LLM, SamplingParams, TokensPrompt
from headstart.inference.metrics import Counter, Vector
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(MODEL)
chats = [[{"role": "user", "content": text}] for text in ("hello", "how are you")]
texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
DEPTH = 3
llm = LLM(
    model=MODEL,
    trust_remote_code=True,
    tensor_parallel_size=1,
    enable_chunked_prefill=False,
    enforce_eager=False,
    gpu_memory_utilization=0.9,
    speculative_config={
        "method": "medusa",
        "model": HEAD,
        "num_speculative_tokens": DEPTH,
        "disable_padded_drafter_batch": False,
        "parallel_drafting": False,
    },
    disable_log_stats=False,
    max_model_len=128,
    limit_mm_per_prompt={"image": 5},
    disable_chunked_mm_input=True,
    max_num_seqs=None,
    allowed_local_media_path="",
)
sampling_params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling_params=sampling_params)
metrics = llm.get_metrics()
total = sum(len(output.outputs[0].token_ids) for output in outputs)
drafts = draft_tokens = accepted = 0
counts = [0] * DEPTH
for metric in metrics:
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        assert isinstance(metric, Counter)
        draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        assert isinstance(metric, Counter)
        accepted += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for position in range(len(metric.values)):
            counts[position] += metric.values[position]
"""


@pytest.fixture(scope="module")
def speculating(target_folder, head_folder):
    return LLM(str(target_folder), dtype="float32", device="cpu", speculative_config={"model": str(head_folder)})


def test_vllms_example_of_speculative_decoding_runs_with_its_import_changed(target_folder, head_folder):
    script = {"MODEL": str(target_folder), "HEAD": str(head_folder)}
    exec(compile(EXAMPLE, "spec_decode.py", "exec"), script)
    spec = [output.outputs[0].spec_decode_metrics for output in script["outputs"]]
    assert script["total"] == 40
    assert script["drafts"] == sum(one.num_steps for one in spec) > 0
    assert script["draft_tokens"] == sum(one.num_draft_tokens for one in spec)
    assert script["accepted"] == sum(one.num_accepted_tokens for one in spec) == sum(script["counts"])


def test_metrics_have_vllms_names_and_the_values_of_the_stats(speculating):
    speculating.generate(["abc" * 30, "abc" * 30 + "d"], GREEDY)
    metrics, stats = {metric.name: metric for metric in speculating.get_metrics()}, speculating.get_stats()
    for name, ours in (
        ("num_preemptions", "num_preemptions"),
        ("generation_tokens", "num_generated_tokens"),
        ("request_success", "num_requests_finished"),
        ("prefix_cache_queries", "prefix_cache_queries"),
        ("prefix_cache_hits", "prefix_cache_hits"),
        ("spec_decode_num_drafts", "num_spec_steps"),
        ("spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "num_accepted_tokens"),
    ):
        assert isinstance(metrics[f"vllm:{name}"], Counter)
        assert metrics[f"vllm:{name}"].value == stats[ours], name
    assert metrics["vllm:prompt_tokens"].value == 90 + 91 > stats["num_prompt_tokens"]
    vector = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(vector, Vector)
    assert [count / stats["num_spec_steps"] for count in vector.values] == stats["acceptance_per_position"]
    assert isinstance(metrics["vllm:kv_cache_usage_perc"], Gauge)
    assert metrics["vllm:num_requests_running"].value == metrics["vllm:kv_cache_usage_perc"].value == 0.0
    assert all(metric.labels["model_name"] == speculating.model_name for metric in metrics.values())


def test_gauges_are_of_this_moment(speculating):
    stream = speculating.stream("a", SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    metrics = {metric.name: metric for metric in speculating.get_metrics()}
    assert metrics["vllm:num_requests_running"].value == 1
    assert 0 < metrics["vllm:kv_cache_usage_perc"].value < 1
    stream.close()


def test_the_vector_has_every_position_before_the_first_draft_and_plain_decoding_has_none(target_folder, head_folder):
    config = {"model": str(head_folder)}
    fresh = LLM(str(target_folder), dtype="float32", device="cpu", speculative_config=config).get_metrics()
    assert [metric.values for metric in fresh if isinstance(metric, Vector)] == [[0, 0, 0]]
    plain = LLM(str(target_folder), dtype="float32", device="cpu").get_metrics()
    assert not any("spec_decode" in metric.name for metric in plain)


def test_the_page_is_that_of_the_tables():
    written = (ROOT / "docs" / "vllm_api.md").read_text(encoding="utf-8")
    assert written == page(), "write it again: python -m headstart.inference.vllm_page > docs/vllm_api.md"


def test_no_name_is_both_ours_and_in_a_table():
    for title, same, rows in sections():
        names = [row if isinstance(row, str) else row.name for row in rows]
        assert len(set(names)) == len(names), title
        assert not set(names) & set(same), title


def accepted():
    rows = [(row, value) for row in LLM_ARGUMENTS for value in (("x",) if row.accepts is ANY else row.accepts)]
    return {f"{row.name}={value!r}": {row.name: value} for row, value in rows}


def test_llm_arguments_are_taken_or_refused_as_the_table_says(target_folder, monkeypatch):
    monkeypatch.setattr("headstart.inference.llm.at_revision", lambda *_: stop())

    def stop():
        raise InterruptedError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in accepted().values():
            with pytest.raises(InterruptedError):
                LLM(str(target_folder), **given)
    for row in LLM_ARGUMENTS:
        if row.accepts is not ANY:
            with pytest.raises(ValueError, match=f"'{row.name}' is vLLM's and not supported here") as error:
                LLM(str(target_folder), **{row.name: "no such value"})
            assert str(error.value).endswith(row.words)
            assert "\n" not in str(error.value)


def test_sampling_parameters_are_taken_or_refused_as_the_table_says():
    for row in SAMPLING:
        for value in ("x",) if row.accepts is ANY else row.accepts:
            assert SamplingParams(**{row.name: value}) == SamplingParams()
        if row.accepts is not ANY:
            with pytest.raises(ValueError, match=f"'{row.name}' is vLLM's and not supported here") as error:
                SamplingParams(**{row.name: "no such value"})
            assert str(error.value).endswith(row.words)


@pytest.mark.parametrize("name", MISSING)
def test_missing_methods_say_what_to_do_instead(speculating, name):
    assert not hasattr(speculating, name)
    with pytest.raises(AttributeError) as error:
        getattr(speculating, name)
    assert str(error.value).endswith(MISSING[name])


def test_values_of_vllm_are_taken(target_folder):
    llm = LLM(
        str(target_folder), device="cpu", dtype="float", seed=None, max_num_seqs=np.int64(3), max_model_len=np.int64(64)
    )
    assert (llm.dtype, llm.seed, llm.engine.max_num_seqs, llm.max_model_len) == (torch.float32, 0, 3, 64)
    assert named_dtype("half") is torch.float16
    asks = {"tensor_parallel_size": np.int64(1), "trust_remote_code": np.bool_(False), "generation_config": "vllm"}
    spec = {"method": "ngram", "num_speculative_tokens": np.int64(3), "draft_tensor_parallel_size": np.int64(1)}
    drafting = LLM(str(target_folder), device="cpu", dtype="float32", speculative_config=spec, **asks)
    assert drafting.generate("a", GREEDY)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide"):
        LLM(str(target_folder), device="cpu", tensor_parallel_size=np.int64(3))
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=[np.int64(4)], seed=-1)
    assert (params.temperature, params.top_k, params.stop_token_ids, params.seed) == (0.5, 3, (4,), None)
    assert type(params.top_k) is int
    assert SamplingParams(logit_bias={"7": 1.5}) == SamplingParams(logit_bias={7: 1.5})
    assert params.clone() == params
    assert SamplingParams.from_optional(temperature=None, max_tokens=None) == SamplingParams(max_tokens=None)


def test_a_revision_is_downloaded_and_a_folder_has_none(target_folder, monkeypatch):
    asked = []
    found = lambda name, **where: asked.append((name, where["revision"], where["cache_dir"])) or str(target_folder)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", found)
    llm = LLM("nobody/nothing", revision="v2", download_dir="/somewhere", dtype="float32", device="cpu")
    assert asked == [("nobody/nothing", "v2", "/somewhere")]
    assert llm.generate("a", GREEDY)
    with pytest.raises(ValueError, match="revision 'v2' is of a model on the Hub"):
        LLM(str(target_folder), revision="v2")


def test_all_logprobs_come_up_to_max_logprobs(target_folder):
    llm = LLM(str(target_folder), dtype="float32", device="cpu", max_logprobs=-1)
    (output,) = llm.generate("a", SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1))
    assert [len(entry) for entry in output.outputs[0].logprobs] == [259, 259]
    few = LLM(llm, max_logprobs=5)
    assert few.generate("a", SamplingParams(max_tokens=2, logprobs=5))
    for count in (-1, 6):
        with pytest.raises(ValueError, match="max_logprobs is 5: build the LLM with"):
            few.generate("a", SamplingParams(logprobs=count))


SPECIAL = [256, 257, 64, 258, 256, 65]  # <|user|> <|assistant|> a <|end|> <|user|> b


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "<|user|><|assistant|>a<|end|><|user|>b"),
        ({"detokenize": False}, ""),
    ],
)
def test_special_tokens_and_texts_are_as_asked_in_generate_and_stream(llm, given, text):
    forced = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, **given)]
    request = llm.session.submit("x", forced[0]).requests[0]
    request.output_token_ids = list(SPECIAL)
    assert request.stop_checker.text(request) == text
    llm.engine.cancel(request)
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, temperature=9.0, allowed_token_ids=SPECIAL, **given)
    (output,) = llm.generate("x", params)[0].outputs
    assert "".join(llm.stream("x", params)) == output.text
    assert ("<|user|>" in output.text) is (given == {"skip_special_tokens": False})


def test_special_tokens_side_by_side_are_joined_if_spaces_are_not_wanted():
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    words.add_special_tokens(["<a>", "<b>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    ids = [0, 2, 3, 2, 1, 2, 0, 3, 3]
    for spaces, text in ((True, "one <a> <b> <a> two <a> one <b> <b>"), (False, "one <a><b><a> two <a> one <b><b>")):
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        checker = StopChecker(tokenizer, (), params)
        decode, growing = checker.decode, GrowingText(checker)
        assert decode(ids) == text
        for count in range(1, 91):
            assert growing.of((ids * 10)[:count]) == decode((ids * 10)[:count])


def test_outputs_carry_times_cached_tokens_and_their_end(llm):
    assert llm.reset_prefix_cache()
    prompt = "cached " * 20
    (first,), (second,) = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert isinstance(first, RequestOutput)
    assert first.outputs[0].finished()
    times = first.metrics
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.num_generation_tokens == 8
    assert 0 < times.first_token_latency < 60
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    llm.engine.check()
    stream = llm.stream(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()


def test_default_sampling_params_are_the_generation_configs(target_folder, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "target")
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=50).save_pretrained(folder)
    llm = LLM(str(folder), dtype="float32", device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=50)


def test_chat_takes_vllms_arguments(llm):
    user, begun = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am"}

    def prompt(messages, **given):
        return llm.chat(messages, GREEDY, **given)[0].prompt

    assert prompt([user], add_generation_prompt=False) == "<|user|>hello"
    template = "{{ tools[0]['name'] if tools else '' }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert prompt([user, begun], chat_template=template) == "[hello][I am]"
    assert prompt([user], chat_template=template, tools=[{"name": "find"}]) == "find[hello]"
    going_on = dict(continue_final_message=True, add_generation_prompt=False)
    assert prompt([user, begun], chat_template=template, **going_on) == "[hello][I am"
    with pytest.raises(ValueError, match="say add_generation_prompt=False"):
        prompt([user, begun], continue_final_message=True)
