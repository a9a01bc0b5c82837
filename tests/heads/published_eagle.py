"""Published EAGLE and EAGLE-3 heads: the original code's, vLLM's, SGLang's and the speculators library's."""

from types import SimpleNamespace

import torch

from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.tests.heads.eagle_reference import eagle3_logits, eagle3_states, eagle_states
from headstart.tests.heads.published_file import FEATURES, STEPS, TOKENS, Published, draw, prefixed, wide
from headstart.tests.heads.test_eagle import LM_HEAD, H, V

I, VD = 36, 11  # inner size, draft vocabulary
IDS = "eagle_aux_hidden_state_layer_ids"
COUNTS = torch.randint(100, (V,), generator=torch.Generator().manual_seed(3))
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(4))  # the target's, for heads that hold none


def eagle(head_dim=4, fc_bias=False, embedding=True, qkv_bias=False, prefix="layers.0.", width=1):
    """The decoder layer's tensors and fc.  width: of the input of q, k and v, in hidden sizes"""
    q, kv = 6 * head_dim, 2 * head_dim
    shapes = {"fc.weight": (H, (width + 1) * H), f"{prefix}post_attention_layernorm.weight": (H,)}
    shapes |= {f"{prefix}self_attn.{one}_proj.weight": (rows, width * H) for one, rows in zip("qkv", (q, kv, kv))}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (H, q), f"{prefix}mlp.down_proj.weight": (H, I)}
    shapes |= {f"{prefix}mlp.{one}_proj.weight": (I, H) for one in ("gate", "up")}
    shapes |= {"embed_tokens.weight": (V, H)} if embedding else {}
    shapes |= {"fc.bias": (H,)} if fc_bias else {}
    if qkv_bias:
        shapes |= {f"{prefix}self_attn.{one}_proj.bias": (rows,) for one, rows in zip("qkv", (q, kv, kv))}
    return draw(shapes)


def llama(**keys):
    """A config as published: no head_dim, no rope_theta."""
    sizes = {"hidden_size": H, "vocab_size": V, "intermediate_size": I, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": False}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 2048}
    return {key: value for key, value in (names | sizes | heads | keys).items() if value != "absent"}


def shape(theta=10000.0, normed=False, eps=1e-5):
    return SimpleNamespace(
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=eps,
        rope_theta=theta,
        norm_before_residual=normed,
        num_aux_layers=3,
    )


def eagle_logits(tensors, theta=10000.0, eps=1e-5):
    def logits():
        raw = wide({"embed_tokens.weight": EMBEDDING} | tensors)
        return [eagle_states(raw, shape(theta, eps=eps), FEATURES[0, :, :H], TOKENS[0, :, 0]) @ LM_HEAD.T]

    return logits


NO_THETA = r'does not say "rope_theta": taken as 10000\.0, with which published heads were trained'
NO_IDS = f'does not say "{IDS}": taken as .2, n//2, n-3., what published heads read'


def eagle_layouts():
    plain, biased, bare, wider = eagle(), eagle(fc_bias=True), eagle(embedding=False), eagle(head_dim=10)
    qwen, zero = eagle(qkv_bias=True), {"fc.bias": torch.zeros(H)}
    half = {name: one.half() for name, one in eagle(fc_bias=True, embedding=False).items()}
    sglang = ["LlamaForCausalLMEagle"]
    lies = dict(hidden_size=7, vocab_size=8, intermediate_size=9, num_hidden_layers=32, num_key_value_heads=6)
    file, unbiased, theta = Published, {"bias": False}, {"rope_theta": 500.0}
    return {
        "EAGLE": file(plain, llama(**unbiased), eagle_logits(plain), "eagle-vllm", (NO_THETA,), "pytorch_model.bin"),
        "EAGLE, fc.bias without the key": file(
            *(half, llama(torch_dtype="float16"), eagle_logits(half), "eagle-sglang", (NO_THETA,), "pytorch_model.bin")
        ),
        "EAGLE, fc.bias against the key": file(
            *(biased, llama(**unbiased, **theta), eagle_logits(biased, 500.0), "eagle-sglang"),
            ('says "bias": False; the tensors hold fc.bias',),
        ),
        "EAGLE, no fc.bias and no key": file(
            *(bare, llama(**theta), eagle_logits(bare, 500.0), "eagle-vllm"),
            ('does not say "bias": False; the tensors hold no fc.bias',),
        ),
        "SGLang's EAGLE": file(
            plain | zero,
            llama(**unbiased, **theta, architectures=sglang),
            *(eagle_logits(plain, 500.0), "eagle-sglang"),
        ),
        "EAGLE of a Qwen2": file(
            qwen, llama(qkv_bias=True, **unbiased, **theta), eagle_logits(qwen, 500.0), "eagle-vllm"
        ),
        "EAGLE of a Qwen2, not said": file(
            *(qwen, llama(**unbiased, **theta), eagle_logits(qwen, 500.0), "eagle-vllm"),
            ('says no "qkv_bias"; the tensors hold a bias of q, k and v',),
        ),
        "EAGLE, biases said in vain": file(
            *(plain, llama(attention_bias=True, mlp_bias=True, **unbiased, **theta), eagle_logits(plain, 500.0)),
            *("eagle-vllm", ("that q, k and v have a bias; the tensors hold none", '"mlp_bias": True; .* none')),
        ),
        "EAGLE, wide heads": file(
            wider, llama(head_dim=10, **unbiased, **theta), eagle_logits(wider, 500.0), "eagle-vllm"
        ),
        "EAGLE, wide heads, not said": file(
            *(wider, llama(**unbiased, **theta), eagle_logits(wider, 500.0), "eagle-vllm"),
            ('does not say "head_dim": taken as 10, by the 60 and 20 rows',),
        ),
        "EAGLE, lies": file(
            *(plain, llama(head_dim=4, torch_dtype="bfloat16", **lies, **unbiased, **theta)),
            *(eagle_logits(plain, 500.0), "eagle-vllm"),
            (
                '"vocab_size": 8; by tensor embed_tokens.weight it is 37',
                '"hidden_size": 7; .* 24',
                '"intermediate_size": 9; .* 36',
                '"num_hidden_layers": 32; .* 1',
                '"num_key_value_heads": 6; .* 2',
                "\"dtype\": 'bfloat16'; the tensors are float32",
            ),
        ),
        "EAGLE, prefixed, of another name": file(
            prefixed("model.", bare),
            llama(architectures=["LlamaForCausalLMEagle3"], rms_norm_eps="absent", **unbiased, **theta),
            eagle_logits(bare, 500.0, eps=1e-6),
            "eagle-vllm",
            (
                'begin with "model."',
                "calls itself LlamaForCausalLMEagle3, which is EAGLE-3; its tensors are EAGLE",
                r'does not say "rms_norm_eps": taken as 1e-06',
            ),
        ),
    }


# EAGLE-3


def eagle3(prefix="midlayer.", draft_vocab_size=VD, embedding=False, head_dim=4):
    tensors = eagle(head_dim, embedding=embedding, prefix=prefix, width=2)
    norms = {f"{prefix}{one}.weight": (H,) for one in ("hidden_norm", "input_layernorm")}
    tensors |= draw(norms | {"norm.weight": (H,), "lm_head.weight": (draft_vocab_size, H)}, seed=8)
    if draft_vocab_size < V:
        tensors["d2t"], tensors["t2d"] = build_draft_vocabulary(COUNTS, draft_vocab_size)
    return tensors


def eagle3_config(draft_vocab_size=VD, **keys):
    return llama(**{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab_size} | keys)


def speculators_config(layer=None, **keys):
    proposal = {"proposal_type": "greedy", "speculative_tokens": STEPS, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    says = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    says |= {"verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}}
    config = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0"}
    config |= {"draft_vocab_size": VD, "target_hidden_size": H, "norm_before_residual": True, IDS: [1, 3, 5]}
    config |= {"norm_before_fc": False, "tie_word_embeddings": False, "speculators_config": says}
    config |= {"transformer_layer_config": llama(rope_theta=500.0, head_dim=4) | (layer or {})}
    return {key: value for key, value in (config | keys).items() if value != "absent"}


def eagle3_depths(tensors, theta=10000.0, normed=False):
    def logits():
        raw = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
        raw = wide({"embed_tokens.weight": EMBEDDING} | raw)
        states = eagle3_states(raw, shape(theta, normed), FEATURES[0], TOKENS[0], STEPS)
        return [eagle3_logits(raw, shape(theta), state) for state in states]

    return logits


def eagle3_layouts():
    plain, vllm, whole = eagle3(), eagle3("layers.0."), eagle3(draft_vocab_size=V)
    full = eagle3("layers.0.", embedding=True)
    no_t2d = {name: one for name, one in plain.items() if name != "t2d"}
    zeros = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    parameters = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    sglang = {"eagle_config": {IDS: [0, 2, 4], "use_aux_hidden_state": True}, "rope_theta": 500.0}
    lies = dict(draft_vocab_size=12, hidden_size=7, vocab_size=99, tie_word_embeddings=True)
    file = Published
    return {
        "EAGLE-3, original": file(
            plain, eagle3_config(), eagle3_depths(plain), "eagle3", (NO_THETA, NO_IDS), "pytorch_model.bin"
        ),
        "vLLM's EAGLE-3": file(
            *(vllm, eagle3_config(**parameters, **{IDS: [1, 3, 5]}), eagle3_depths(vllm, 500.0), "eagle3"),
            ('its layer is called "layers.0.", in files of the format eagle3 it is "midlayer."',),
        ),
        "SGLang's EAGLE-3": file(plain, eagle3_config(**sglang), eagle3_depths(plain, 500.0), "eagle3"),
        "EAGLE-3, model. before most": file(
            prefixed("model.", plain, ("lm_head.weight", "d2t", "t2d")),
            *(eagle3_config(**sglang), eagle3_depths(plain, 500.0), "eagle3", ('begin with "model."',)),
        ),
        "EAGLE-3, whole vocabulary": file(whole, eagle3_config(V, **sglang), eagle3_depths(whole, 500.0), "eagle3"),
        "EAGLE-3, whole vocabulary listed": file(
            whole | zeros, eagle3_config(V, **sglang), eagle3_depths(whole, 500.0), "eagle3"
        ),
        "EAGLE-3, t2d absent": file(no_t2d, eagle3_config(**sglang), eagle3_depths(plain, 500.0), "eagle3"),
        "EAGLE-3, lies": file(
            *(plain, eagle3_config(head_dim=4, **sglang) | lies, eagle3_depths(plain, 500.0), "eagle3"),
            (
                '"vocab_size": 99; by tensor t2d it is 37',
                '"draft_vocab_size": 12; by tensor lm_head.weight it is 11',
                '"tie_word_embeddings": True; the tensors hold an lm_head of its own',
                '"hidden_size": 7; .* 24',
            ),
        ),
        "speculators": file(full, speculators_config(), eagle3_depths(full, 500.0, True), "speculators"),
        "speculators, little said": file(
            *(vllm, speculators_config({"rope_theta": None}, norm_before_residual="absent", **{IDS: None})),
            *(eagle3_depths(vllm, normed=True), "speculators"),
            (NO_IDS, 'does not say "norm_before_residual": taken as True, as readers of this format do', NO_THETA),
        ),
    }
