"""transformers' assisted generation beside the replay: the same shapes of target and draft model, one request.

Random weights would accept nothing. With an lm_head of zeros both models choose token 0 everywhere, so every draft is accepted, and
a step of the library takes the time it takes at any acceptance: the draft's passes, the target's pass, the host's work. The
measured acceptance of the fourth stage over this time is the rate that the second table shows.
"""

import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

NEW_TOKENS = 96
REPEATS = 3
DRAFT_WIDTH, DRAFT_LAYERS = 0.375, 0.375  # of the target's: about a tenth of the weights of an 8B Llama


def draft_config(config):
    """A Llama of the target's vocabulary with about a tenth of the weights of an 8B."""
    text = config.get_text_config()
    width = max(int(DRAFT_WIDTH * text.hidden_size) // 64 * 64, 64)
    heads = width // 64
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 3 // 128 * 128,
        num_hidden_layers=max(round(DRAFT_LAYERS * text.num_hidden_layers), 1),
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 3, 1),
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def zero_model(config, dtype, device):
    """A random model whose logits are all 0."""
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    if module.lm_head.weight is module.get_input_embeddings().weight:
        module.lm_head.weight = torch.nn.Parameter(torch.zeros_like(module.lm_head.weight), requires_grad=False)
    module.lm_head.weight.zero_()
    return module


def measure_assisted(config, settings, dtype, device):
    """{"plain_ms": of a token, "assisted_ms": of a step, "tokens_per_step": in these, "draft_parameters", ...}"""
    target, draft = (zero_model(one, dtype, device) for one in (config, draft_config(config)))
    draft.generation_config.num_assistant_tokens = settings.depth
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    passes = []

    def note(*_):
        # The clock of the first pass, the prompt's, is read at its end; the others' are only counted.
        if not passes and device.type == "cuda":
            torch.cuda.synchronize()
        passes.append(time.perf_counter())

    target.register_forward_hook(note)
    new_tokens = min(NEW_TOKENS, settings.speed_tokens)
    ids = torch.randint(config.get_text_config().vocab_size, (1, settings.speed_prompt), device=device)

    def run(**assistant):
        """(milliseconds of a pass after the prompt's, tokens of a pass); the best of several runs, for the host's sake."""
        found = []
        for _ in range(REPEATS):
            passes.clear()
            with torch.no_grad():
                output = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                    **assistant,
                )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds, later = time.perf_counter() - passes[0], len(passes) - 1
            found.append((1e3 * seconds / later, (output.shape[1] - ids.shape[1]) / len(passes)))
        return min(found)

    plain, assisted = run(), run(assistant_model=draft)
    return {
        "plain_ms": plain[0],
        "assisted_ms": assisted[0],
        "tokens_per_step": assisted[1],
        "draft_parameters": sum(one.numel() for one in draft.parameters()),
        "target_parameters": sum(one.numel() for one in target.parameters()),
    }
