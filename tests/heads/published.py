"""Small random checkpoints with exactly the names, shapes and configs of published heads, the odd ones included, and their maths.

    LAYOUTS["EAGLE-3, original"].write(folder)

Every layout says what it is read as: its format, the notes that are told, and its logits, in fp64 and from the published names by
an implementation that has nothing of heads/ in it (for EAGLE heads eagle_reference.py, for MLP speculators test_mlp_speculator.py).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.tests.heads import test_mlp_speculator
from headstart.tests.heads.eagle_reference import eagle3_logits, eagle3_states, eagle_states
from headstart.tests.heads.test_eagle import LM_HEAD, H, T, V, one_document, text

I, VD, STEPS = 36, 11, 3  # inner size, draft vocabulary, steps of EAGLE-3
IDS = "eagle_aux_hidden_state_layer_ids"
COUNTS = torch.randint(100, (V,), generator=torch.Generator().manual_seed(3))
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(4))  # the target's, for heads that hold none
FEATURES, TOKENS = text(width=3 * H, steps=(STEPS,))
MLP_FEATURES = torch.randn(1, test_mlp_speculator.H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


@dataclass(frozen=True)
class Published:
    """One checkpoint and what is true of it."""

    tensors: dict
    config: dict
    logits: Callable  # () -> what a reader must compute, one tensor per depth
    format: str
    notes: tuple = ()  # patterns of what is told of its config, all of it
    file_name: str = "model.safetensors"
    num_shards: int = 1

    def write(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save = torch.save if self.file_name.endswith((".bin", ".pt")) else save_file
        if self.num_shards == 1:
            return save(self.tensors, folder / self.file_name)
        stem, _, suffix = self.file_name.rpartition(".")
        places = {
            name: f"{stem}-{1 + i % self.num_shards:05d}-of-{self.num_shards:05d}.{suffix}"
            for i, name in enumerate(self.tensors)
        }
        for shard in {*places.values()}:
            save({name: tensor for name, tensor in self.tensors.items() if places[name] == shard}, folder / shard)
        (folder / f"{self.file_name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def draw(shapes, seed=5):
    """Random tensors, none like another, by their shapes; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {name: 1 + value if "norm" in name else value for name, value in found.items()}


def wide(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


def prefixed(prefix, tensors, outside=()):
    return {name if name in outside else prefix + name: tensor for name, tensor in tensors.items()}


# Medusa


def medusa(num_heads=3, num_layers=1, shared=False):
    """FasterDecoding's names: Sequential(ResBlock, ..., Linear) by head."""
    shapes = {}
    for k in range(num_heads):
        for j in range(num_layers):
            shapes |= {f"{k}.{j}.linear.weight": (H, H), f"{k}.{j}.linear.bias": (H,)}
        shapes |= {} if shared else {f"{k}.{num_layers}.weight": (V, H)}
    return draw(shapes)


def medusa_config(num_heads=3, num_layers=1, **keys):
    counts = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    return {"base_model_name_or_path": "some/target"} | counts | keys


def as_vllm(tensors):
    """vLLM's names of the same tensors."""
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    return renamed


def vllm_config(**keys):
    sizes = {"hidden_size": H, "vocab_size": V, "truncated_vocab_size": V, "num_heads": 3, "num_hidden_layers": 1}
    return {"model_type": "medusa", "architectures": ["MedusaModel"], "max_paths": 64, "topk": 10} | sizes | keys


def medusa_logits(tensors, num_heads=3, num_layers=1):
    def logits():
        raw, found = wide(tensors), []
        for k in range(num_heads):
            x = FEATURES[0, :, :H]
            for j in range(num_layers):
                y = x @ raw[f"{k}.{j}.linear.weight"].T + raw[f"{k}.{j}.linear.bias"]
                x = x + y / (1 + torch.exp(-y))
            found.append(x @ raw.get(f"{k}.{num_layers}.weight", LM_HEAD).T)
        return found

    return logits


def medusa_layouts():
    own, shared, deep, five = medusa(), medusa(shared=True), medusa(num_layers=2), medusa(num_heads=5)
    pt, target_lm_head = "medusa_lm_head.pt", {"lm_heads.0.weight": LM_HEAD.float()}
    # The original code repeats one block.
    tied = deep | {
        f"{k}.1.linear.{part}": deep[f"{k}.0.linear.{part}"] for k in range(3) for part in ("weight", "bias")
    }
    silent = {name: torch.zeros_like(one) if name.endswith("bias") else one for name, one in own.items()}
    unbiased = {name: one for name, one in own.items() if not name.endswith("bias")}
    biased = {"medusa_fc_bias": True}
    lies = {"num_heads": 2, "num_hidden_layers": 4, "hidden_size": 7, "vocab_size": 8, "truncated_vocab_size": 9}
    file = Published
    return {
        "Medusa": file(own, medusa_config(), medusa_logits(own), "medusa", file_name="medusa_lm_head.safetensors"),
        "Medusa, 2 heads said and 5 held": file(
            five, medusa_config(2), medusa_logits(five, 5), "medusa", ('"medusa_num_heads": 2; .* it is 5',), pt
        ),
        "Medusa, tied blocks": file(tied, medusa_config(3, 2), medusa_logits(tied, 3, 2), "medusa", (), pt),
        "Medusa, of a whole model": file(
            prefixed("medusa_head.", own), medusa_config(), medusa_logits(own), "medusa", ('begin with "medusa_head."',)
        ),
        "Medusa, shared lm_head": file(
            shared, medusa_config(version="2", vocab_size=V), medusa_logits(shared), "medusa-shared", (), pt
        ),
        "Medusa, shared lm_head not said": file(
            *(shared, medusa_config(vocab_size=V), medusa_logits(shared), "medusa-shared"),
            ('does not say "version": "2"; the tensors hold no lm_heads',),
            pt,
        ),
        "Medusa, of a parallel training": file(
            *(prefixed("module.", own), medusa_config(version="2"), medusa_logits(own), "medusa"),
            ('begin with "module."', 'says "version": "2"; the tensors hold lm_heads of their own'),
        ),
        "vLLM's Medusa": file(as_vllm(own), vllm_config(**biased), medusa_logits(own), "vllm"),
        "vLLM's Medusa, prefixed": file(
            *(prefixed("medusa_heads.", as_vllm(own)), vllm_config(**biased), medusa_logits(own), "vllm"),
            ('begin with "medusa_heads."',),
        ),
        "vLLM's Medusa, no biases": file(as_vllm(unbiased), vllm_config(), medusa_logits(silent), "vllm"),
        "vLLM's Medusa, lies": file(
            *(as_vllm(own), vllm_config(**lies), medusa_logits(own), "vllm"),
            (
                '"hidden_size": 7; .* 24',
                '"vocab_size": 8; .* 37',
                '"num_heads": 2; .* 3',
                '"num_hidden_layers": 4; .* 1',
                '"truncated_vocab_size": 9; .* 37',
                'does not say "medusa_fc_bias": True; the tensors hold the biases',
            ),
        ),
        "vLLM's Medusa, shared lm_head": file(
            as_vllm(shared) | target_lm_head,
            vllm_config(original_lm_head=True, **biased),
            medusa_logits(shared),
            "vllm",
        ),
        "vLLM's Medusa, shared lm_head said in vain": file(
            *(as_vllm(own), vllm_config(original_lm_head=True, **biased), medusa_logits(own), "vllm"),
            ('"original_lm_head": True; .* False',),
        ),
    }


# MLP speculator


def mlp(steps=3, tied=False):
    h, v, s = test_mlp_speculator.H, test_mlp_speculator.V, test_mlp_speculator.S
    shapes = {}
    for i in range(1 if tied else steps):
        shapes |= {f"emb.{i}.weight": (v, s), f"head.{i}.weight": (v, s)}
        shapes |= {f"ln.{i}.weight": (s,), f"ln.{i}.bias": (s,)}
    shapes |= {f"proj.{i}.weight": (s, s if i else h) for i in range(min(steps, 2) if tied else steps)}
    return draw(shapes)


def repeated(tensors, steps=3):
    """A tied file that says everything for every step."""
    found = {}
    for name, tensor in tensors.items():
        kind, first, what = name.split(".")
        for i in range(int(first), 1 if kind == "proj" and first == "0" else steps):
            found[f"{kind}.{i}.{what}"] = tensor.clone()
    return found


def mlp_config(steps=3, tied=False, scaled=False, **keys):
    h, v, s = test_mlp_speculator.H, test_mlp_speculator.V, test_mlp_speculator.S
    names = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "torch_dtype": "float32",
    }
    sizes = {"vocab_size": v, "emb_dim": h, "inner_dim": s, "n_predict": steps, "n_candidates": 5}
    flags = {"top_k_tokens_per_head": [5, 4, 3][:steps], "tie_weights": tied, "scale_input": scaled}
    return names | sizes | flags | keys


def mlp_logits(tensors, steps=3, tied=False, scaled=False):
    def logits():
        config = SimpleNamespace(num_steps=steps, tie_weights=tied, scale_input=scaled)
        head = SimpleNamespace(config=config, state_dict=lambda: wide(tensors))
        return list(test_mlp_speculator.by_hand(head, MLP_FEATURES[0], list(range(steps)))[:, None])

    return logits


def mlp_layouts():
    own, one, tied = mlp(), mlp(1), mlp(tied=True)
    kind, prefix = "mlp-speculator", "speculator."
    file = Published
    lies = dict(n_predict=4, vocab_size=7, emb_dim=8, inner_dim=0)
    silent = {key: value for key, value in mlp_config().items() if key != "scale_input"}
    untold = {key: value for key, value in mlp_config().items() if key != "tie_weights"}
    return {
        "MLP speculator": file(prefixed(prefix, own), mlp_config(), mlp_logits(own), kind),
        "MLP speculator, scaled": file(
            prefixed(prefix, one), mlp_config(1, scaled=True), mlp_logits(one, 1, scaled=True), kind
        ),
        "MLP speculator, tied, repeated": file(
            prefixed(prefix, repeated(tied)),
            mlp_config(tied=True),
            mlp_logits(tied, tied=True),
            kind,
            (),
            "pytorch_model.bin",
        ),
        "MLP speculator, tied": file(prefixed(prefix, tied), mlp_config(tied=True), mlp_logits(tied, tied=True), kind),
        "MLP speculator, tied, not said": file(
            *(prefixed(prefix, tied), untold, mlp_logits(tied, tied=True), kind),
            ('does not say "tie_weights": True; the tensors hold what tied steps share',),
        ),
        "MLP speculator, tied said in vain": file(
            *(prefixed(prefix, own), mlp_config(tied=True), mlp_logits(own), kind),
            ('"tie_weights": True; the tensors of the steps are different ones',),
        ),
        "MLP speculator, 2 steps said and 3 repeated": file(
            prefixed(prefix, repeated(tied)),
            *(mlp_config(2, True), mlp_logits(tied, tied=True), kind),
            ('"n_predict": 2; .* it is 3', r'2 numbers as "top_k_tokens_per_head"; there are 3 steps'),
        ),
        "MLP speculator, scale not said": file(
            prefixed(prefix, own), silent, mlp_logits(own), kind, ('does not say "scale_input": taken as False',)
        ),
        "MLP speculator, lies": file(
            *(prefixed(prefix, own), mlp_config(**lies), mlp_logits(own), kind),
            ('"n_predict": 4; .* 3', '"vocab_size": 7; .* 23', '"emb_dim": 8; .* 12', '"inner_dim": 8; .* 20'),
        ),
        "fms-extras' MLP speculator": file(
            own, mlp_config(), mlp_logits(own), kind, ('the names of its tensors lack the prefix "speculator."',)
        ),
    }


# EAGLE


def eagle(head_dim=4, fc_bias=False, embedding=True, qkv_bias=False, prefix="layers.0.", width=1):
    """The decoder layer's tensors and fc.  width: of what q, k and v read, in hidden sizes"""
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
    """A config as it is published: no head_dim, no rope_theta."""
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


LAYOUTS = medusa_layouts() | mlp_layouts() | eagle_layouts() | eagle3_layouts()


def in_shards(layout, file_name):
    """The same checkpoint in three shards."""
    return Published(layout.tensors, layout.config, layout.logits, layout.format, layout.notes, file_name, 3)


LAYOUTS |= {
    "vLLM's Medusa, sharded": in_shards(LAYOUTS["vLLM's Medusa"], "model.safetensors"),
    "MLP speculator, sharded": in_shards(LAYOUTS["MLP speculator"], "pytorch_model.bin"),
    "EAGLE-3, sharded": in_shards(LAYOUTS["EAGLE-3, original"], "pytorch_model.bin"),
    "speculators, sharded": in_shards(LAYOUTS["speculators"], "model.safetensors"),
}


def logits_of(head):
    """What a loaded head (fp64) computes where Published.logits does: one tensor per depth."""
    kind = type(head).__name__
    if kind == "Medusa":
        return head(FEATURES[0, :, :H], LM_HEAD)[0]
    if kind == "MLPSpeculator":
        return head(MLP_FEATURES, torch.arange(head.num_speculative_tokens)[None])[0]
    if head.needs_embedding:
        head.take_embedding(EMBEDDING.double())
    if kind == "Eagle":
        return [head(FEATURES[..., :H], TOKENS[..., 0], *one_document(T))[0] @ LM_HEAD.T]
    return [head.logits(state)[0] for state in head(FEATURES, TOKENS, *one_document(T), STEPS)]
