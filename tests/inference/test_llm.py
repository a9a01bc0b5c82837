"""The public API: its inputs and outputs. (Its refusals: test_llm_bad_input.py.)"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart import LLM, SamplingParams
from headstart.heads.checkpoint import save_head
from headstart.inference.forbidden_tokens import bad_word_sequences
from headstart.inference.line import Call
from headstart.inference.speculation.tree import chain, save_tree

EMBEDDED = Path(__file__).resolve().parents[2] / "assets" / "stdlib-coder"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_greedy_output_is_that_of_transformers(llm, target_folder):
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompt = list(range(40, 75))
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert output.outputs[0].token_ids == expected


def test_every_form_of_prompt_is_taken(llm):
    tokenizer = llm.tokenizer
    text, ids = "def f(x):", tokenizer("def f(x):")["input_ids"]
    forms = [
        text,
        [text],
        ids,
        [ids],
        {"prompt_token_ids": ids},
        [{"prompt": text}],
        {"prompt": text, "prompt_token_ids": ids},
    ]
    outputs = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert all(output[0].outputs[0].token_ids == outputs[0][0].outputs[0].token_ids for output in outputs)
    assert [output[0].prompt for output in outputs] == [text, text, None, None, None, text, text]
    assert all(output[0].prompt_token_ids == ids for output in outputs)
    assert outputs[0][0].outputs[0].text == tokenizer.decode(
        outputs[0][0].outputs[0].token_ids, skip_special_tokens=True
    )


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 9, 1)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 9, 1]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|user|>hello<|assistant|>"
    expected = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert output.prompt_token_ids == expected
    assert isinstance(output.request_id, str)
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2


def test_n_outputs_differ_in_their_noise_and_repeat_with_their_seed(llm):
    params = SamplingParams(temperature=1.0, max_tokens=20, n=3, seed=5, ignore_eos=True)
    first, second = llm.generate("x", params), llm.generate("x", params)
    tokens = [output.token_ids for output in first[0].outputs]
    assert [output.index for output in first[0].outputs] == [0, 1, 2]
    assert len({tuple(t) for t in tokens}) == 3
    assert tokens == [output.token_ids for output in second[0].outputs]


def test_requests_without_a_seed_derive_one_from_the_llms_and_their_number(target_folder):
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)

    def tokens(seed):
        outputs = LLM(str(target_folder), dtype="float32", seed=seed).generate(["same", "same"], params)
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens(0) == tokens(0)
    assert tokens(0)[0] != tokens(0)[1]
    assert tokens(0)[0] != tokens(1)[0]


def test_derived_seeds_are_those_of_earlier_versions(target_folder):
    """What was drawn without a seed of its own is drawn again by a later version."""
    session = LLM(str(target_folder), dtype="float32", seed=7).session
    drawn = [session.submit("x", SamplingParams(max_tokens=1)).requests[0].seed for _ in range(3)]
    assert drawn == [4428597887881648701, 4640734512161947402, 7299484271657422945]


def test_temperature_follows_the_targets_distribution(llm, target_folder):
    """The first token over many seeds against softmax(logits / T): a chi-square test, and a wrong T that fails it."""
    prompt = llm.tokenizer("abc")["input_ids"]
    module = AutoModelForCausalLM.from_pretrained(target_folder, dtype=llm.dtype)
    logits = module(torch.tensor([prompt])).logits[0, -1].double()
    count = 800
    params = [SamplingParams(temperature=0.7, max_tokens=1, seed=s, ignore_eos=True) for s in range(count)]
    drawn = [o.outputs[0].token_ids[0] for o in llm.generate([prompt] * count, params)]
    observed = torch.bincount(torch.tensor(drawn), minlength=len(logits)).double()

    def statistic(temperature):
        p = (logits / temperature).softmax(-1)
        frequent = p * count >= 5
        groups = torch.cat((p[frequent], p[~frequent].sum()[None])) * count
        seen = torch.cat((observed[frequent], observed[~frequent].sum()[None]))
        degrees = len(groups) - 1
        # Wilson-Hilferty: a chi-square statistic as a standard normal one
        chi = ((seen - groups) ** 2 / groups).sum()
        return (((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5).item()

    assert statistic(0.7) < 4.5
    assert statistic(1.0) > 4.5


def test_logprobs_are_those_of_the_raw_logits(llm, target_folder):
    params = SamplingParams(temperature=0.5, max_tokens=6, logprobs=2, seed=1, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    module = AutoModelForCausalLM.from_pretrained(target_folder, dtype=llm.dtype)
    expected = module(torch.tensor([ids])).logits[0].log_softmax(-1)
    for i, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs)):
        row = expected[len(output.prompt_token_ids) - 1 + i]
        assert token in entry
        assert len(entry) in (2, 3)
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
            assert logprob.rank == int((row > row[candidate]).sum()) + 1
            assert logprob.decoded_token == llm.tokenizer.decode([candidate])


def test_stop_conditions_end_the_output(llm):
    full = llm.generate("hello there", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    third = full.token_ids[2]
    stopped = llm.generate(
        "hello there", SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[third], ignore_eos=True)
    )
    end = full.token_ids.index(third)
    assert stopped[0].outputs[0].token_ids == full.token_ids[: end + 1]
    assert (stopped[0].outputs[0].finish_reason, stopped[0].outputs[0].stop_reason) == ("stop", third)
    later = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=end + 2, stop_token_ids=[third], ignore_eos=True)
    assert third not in llm.generate("hello there", later)[0].outputs[0].token_ids[: end + 1]

    needle = full.text[5:7]
    stopped = llm.generate("hello there", SamplingParams(temperature=0.0, max_tokens=30, stop=needle, ignore_eos=True))
    assert stopped[0].outputs[0].text == full.text[: full.text.index(needle)]
    assert (stopped[0].outputs[0].finish_reason, stopped[0].outputs[0].stop_reason) == ("stop", needle)


def test_the_stream_adds_up_to_the_output(llm):
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3, stop=["zq"], ignore_eos=True)
    pieces, stream = [], llm.stream("hello", params)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            output = end.value
            break
    assert len(pieces) > 5
    assert "".join(pieces) == output.outputs[0].text
    assert output.outputs[0].token_ids == llm.generate("hello", params)[0].outputs[0].token_ids


def test_an_engine_on_a_loaded_module_shares_its_weights(target_folder):
    module = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    expected = module(torch.tensor([[5, 6, 7]])).logits
    llm = LLM(module, tokenizer=AutoTokenizer.from_pretrained(target_folder))
    layer, packed = module.model.layers[0].self_attn, llm.engine.decoder.layers[0].attention.qkv.weight
    assert layer.k_proj.weight.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert torch.equal(module(torch.tensor([[5, 6, 7]])).logits, expected)
    again = LLM(module)
    assert again.engine.decoder.layers[0].attention.qkv.weight.data_ptr() == packed.data_ptr()
    (output,) = again.generate([[5, 6, 7]], GREEDY)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 8


def test_heads_of_every_kind_draft_and_change_nothing(llm, target_folder, head_folder, make_target_head, tmp_path):
    prompts = ["one", "another", "def f("]
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=7)
    plain = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    save_tree(chain(2), tmp_path / "tree.json")
    shared = make_target_head(num_heads=2, shared_lm_head=True)
    save_head(shared, tmp_path / "shared")
    for speculative in (
        {"model": str(head_folder)},
        {"model": head_folder, "num_speculative_tokens": 1},
        {"model": str(tmp_path / "shared"), "verifier": "strict"},
        {"model": shared, "tree": str(tmp_path / "tree.json")},
    ):
        fast = LLM(str(target_folder), dtype="float32", speculative_config=speculative)
        outputs = fast.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == plain
        metrics = fast.get_stats()
        assert metrics["num_spec_steps"] == sum(o.outputs[0].spec_decode_metrics.num_steps for o in outputs) > 0
        assert metrics["num_generated_tokens"] == sum(map(len, plain))
        assert metrics["acceptance_length"] == 1 + metrics["num_accepted_tokens"] / metrics["num_spec_steps"]


def test_a_stream_loses_nothing_when_other_calls_step_the_engine(llm):
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    whole = llm.generate("hello", params)[0].outputs[0].text
    first, second = llm.stream("hello", params), llm.stream("hello", params)
    pieces = [next(first)], [next(second)]
    llm.generate("something else", params)
    pieces[1].extend(second)
    pieces[0].extend(first)
    assert ["".join(one) for one in pieces] == [whole, whole]


def test_prompts_are_kept_short_beside_streams_alone(llm, monkeypatch):
    """With at most 3 known tokens beside a stream: a prompt that enters takes many steps, beside other outputs one."""

    def known_budget(running, entering, plan):
        assert entering
        return 3 if any(request.is_streamed for request in running) else None

    monkeypatch.setattr(llm.engine.graphs, "known_budget", known_budget)
    params, prompt = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), [3] * 15

    def passes(call):
        running = llm.session.submit([1, 2], params, call)
        llm.session.step()
        before, entering = llm.engine.metrics.num_prefill_passes, llm.session.submit(prompt, params)
        while not (running.finished and entering.finished):
            llm.session.step()
        return llm.engine.metrics.num_prefill_passes - before

    assert passes(Call()) == 1
    assert passes(Call(is_stream=True)) == 5


def test_a_role_that_the_template_names_is_taken(target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ '!' if m['role'] == 'boss' }}{{ m['content'] }}{% endfor %}"
    llm = LLM(str(target_folder), tokenizer=tokenizer, dtype="float32")
    (output,) = llm.chat([{"role": "boss", "content": "go"}], GREEDY)
    assert output.prompt == "!go"


def test_the_device_may_be_left_to_the_engine(llm, target_folder):
    assert (
        LLM(str(target_folder), dtype="float32", device=None).device == LLM(str(target_folder), dtype="float32").device
    )
    assert LLM(llm, device=torch.device("cpu")).device.type == "cpu"


def test_the_metrics_count_tokens_found_in_the_cache(target_folder):
    llm = LLM(str(target_folder), dtype="float32", max_num_seqs=1)
    prompt = list(range(130))
    for _ in range(2):
        llm.generate([prompt], GREEDY)
    metrics = llm.get_stats()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (260, 128)
    assert metrics["num_prompt_tokens"] == 260 - 128
    without = LLM(llm, enable_prefix_caching=False)
    without.generate([prompt], GREEDY)
    assert without.get_stats()["prefix_cache_queries"] == 0


def test_bad_words_are_spelt_with_and_without_a_space():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)

    def ids(text):
        return tuple(tokenizer(text)["input_ids"])

    assert len(ids("return")) == len(ids(" return")) == 1, "another token with a space"
    assert bad_word_sequences(["return"], tokenizer) == (ids("return"), ids(" return"))
    assert bad_word_sequences(["  return"], tokenizer) == (ids("return"), ids(" return"))
    assert len(ids("os.path")) == len(ids(" os.path")) == 3
    assert bad_word_sequences(["os.path", "1"], tokenizer) == (*map(ids, ("os.path", " os.path", "1", " 1")),)
    # Where the space makes more tokens, the word without it is found after it.
    word = next(word for word in ("\n", "(x", "::", "日") if word.strip() and len(ids(" " + word)) != len(ids(word)))
    assert bad_word_sequences([word], tokenizer) == (ids(word),)


def test_no_prompts_give_no_outputs_and_numbers_of_other_libraries_are_token_ids(llm):
    assert llm.generate([], GREEDY) == []
    (output,) = llm.generate([torch.tensor([40, 41, 42]).numpy().tolist()], GREEDY)
    (same,) = llm.generate([[np.int64(40), np.int32(41), 42]], GREEDY)
    assert same.prompt_token_ids == [40, 41, 42]
    assert {type(token) for token in same.prompt_token_ids} == {int}
    assert same.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_call_does_not_wait_for_streams_that_are_open(llm):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, ignore_eos=True)
    expected = llm.generate("open", params)[0].outputs[0]
    stream = llm.stream("open", params)
    pieces = [next(stream)]
    decoded = llm.get_stats()["num_generated_tokens"]
    llm.generate("short", SamplingParams(max_tokens=2))
    assert llm.get_stats()["num_generated_tokens"] - decoded < 10
    pieces += stream
    assert "".join(pieces) == expected.text


def test_eos_is_named_where_it_was_asked_for_as_a_stop_token(llm):
    sampled = dict(temperature=5.0, seed=3, max_tokens=200)
    free = llm.generate("x", SamplingParams(**sampled, ignore_eos=True))[0].outputs[0].token_ids
    token = free[2]
    before, llm.engine.eos_token_ids = llm.eos_token_ids, {token}
    try:
        for asked, reason in (({}, None), ({"ignore_eos": True, "stop_token_ids": [token]}, token)):
            (one,) = llm.generate("x", SamplingParams(**sampled, **asked))[0].outputs
            assert (one.finish_reason, one.stop_reason, one.token_ids) == ("stop", reason, free[:3])
    finally:
        llm.engine.eos_token_ids = before


def test_what_code_for_vllm_says_of_one_gpu_is_taken(target_folder):
    asks = dict(tensor_parallel_size=1, pipeline_parallel_size=1, trust_remote_code=False, quantization=None)
    spec = {"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}
    llm = LLM(str(target_folder), dtype="float32", device="cpu", speculative_config=spec, **asks)
    assert llm.get_tokenizer() is llm.tokenizer
    for name, value in (("pipeline_parallel_size", 2), ("quantization", "awq")):
        with pytest.raises(ValueError, match=f"'{name}' is vLLM's and not supported"):
            LLM(str(target_folder), **{name: value})
    with pytest.raises(
        ValueError, match="draft_tensor_parallel_size=2: there is one rank; give tensor_parallel_size=2, too"
    ):
        LLM(str(target_folder), speculative_config=spec | {"draft_tensor_parallel_size": 2})


def test_what_code_for_vllm_says_of_a_call_is_taken_where_it_asks_for_nothing(llm, target_folder):
    messages = [{"role": "user", "content": "hello"}]
    (expected,) = llm.chat(messages, GREEDY)
    asks = dict(add_generation_prompt=True, continue_final_message=False, tools=None, lora_request=None)
    assert llm.chat(messages=messages, sampling_params=GREEDY, **asks)[0].outputs[0].text == expected.outputs[0].text
    assert llm.generate(expected.prompt, GREEDY, lora_request=None, priority=None)[0].prompt == expected.prompt
    for name, value in (("lora_request", "x"), ("chat_template_content_format", "openai")):
        with pytest.raises(ValueError, match=f"'{name}' is vLLM's and not supported"):
            llm.chat(messages, GREEDY, **{name: value})
    with pytest.raises(ValueError, match="unknown argument 'sampling_param'; did you mean 'sampling_params'"):
        llm.generate("x", sampling_param=GREEDY)
    for options in ({"add_generation_prompt": False}, {"conversation": 1}, "x", ["x"]):
        with pytest.raises(ValueError, match="chat_template_kwargs are what the template takes besides"):
            llm.chat(messages, GREEDY, chat_template_kwargs=options)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.chat_template = "{% if loud %}!{% endif %}{{ messages[0]['content'] }}"
    other = LLM(llm, tokenizer=tokenizer)
    assert [other.chat(messages, GREEDY, chat_template_kwargs=o)[0].prompt for o in (None, {"loud": True})] == [
        "hello",
        "!hello",
    ]


def test_a_message_in_parts_is_the_text_of_its_parts(llm):
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "this"}]
    (expected,) = llm.chat([{"role": "user", "content": "what is this"}], GREEDY)
    (found,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert found.prompt == expected.prompt
    for bad in ([{"type": "image_url", "image_url": {}}], ["what"], [{"type": "text"}]):
        with pytest.raises(ValueError, match=r"of content in parts only .*'text'.* is taken, got"):
            llm.chat([{"role": "user", "content": bad}], GREEDY)


def test_an_interrupted_call_leaves_an_engine_that_goes_on(llm, monkeypatch):
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return step()

    expected = llm.generate("after", GREEDY)[0].outputs[0].token_ids
    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["long"] * 12, GREEDY)
    monkeypatch.undo()
    assert not llm.engine.scheduler.has_unfinished
    assert llm.engine.num_free_pages == llm.engine.scheduler.num_pages
    assert llm.generate("after", GREEDY)[0].outputs[0].token_ids == expected


def test_a_callers_modes_change_nothing(llm):
    """Modes of torch belong to a thread; the first to need a table of the logits makes it for all."""
    sampled = dict(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    params = SamplingParams(**sampled, frequency_penalty=0.5, logit_bias={70: 2.0})
    fresh, expected = LLM(llm), LLM(llm).generate("x", params)[0].outputs[0].token_ids
    with torch.inference_mode():
        built = LLM(llm)
        assert built.generate("x", params)[0].outputs[0].token_ids == expected
        assert fresh.generate("x", params)[0].outputs[0].token_ids == expected
    for one in (built, fresh):
        assert one.generate("x", params)[0].outputs[0].token_ids == expected
