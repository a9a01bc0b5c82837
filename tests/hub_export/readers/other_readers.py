"""Models of how other projects read heads: the files, keys and names they use, and what they do silently.

Every reader takes (folder, target) and returns the logits it would draft with, depth by depth [T, V]. It raises Refused if the
project would stop with an error, and returns None if it would serve without speculation. Tensors that the project would use without
loading them have random values here. Independent of heads/: files are read by names, the formulas are eagle_reference's or written
here. Not here: scaled rope. From the projects' source code of 2025 and 2026.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from headstart.tests.heads.eagle_reference import eagle3_logits, eagle3_states, eagle_states

ABSENT = -1e9  # the logit of a token that is not in the draft vocabulary


class Refused(Exception):
    """The reader stops with an error."""


@dataclass
class Target:
    """The parts of the target that readers use, and a text of T tokens: fp64."""

    lm_head: torch.Tensor  # [V, H]
    embedding: torch.Tensor  # [V, H]
    streams: list  # the streams entering layer 0, 1, ..., and the last layer's output: [T, H] each
    final: torch.Tensor  # [T, H]
    tokens: torch.Tensor  # [T, S]: those at t + 1, t + 2, ...

    @property
    def default_layers(self):
        depth = len(self.streams) - 1
        return [2, depth // 2, depth - 3]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder, name="model.safetensors"):
    """{name: tensor} in fp64, integers unchanged."""
    if not (folder / name).is_file():
        raise Refused(f"there is no {name}")
    read = load_file if name.endswith(".safetensors") else torch.load
    return {key: one.double() if one.is_floating_point() else one for key, one in read(folder / name).items()}


def need(condition, reason):
    if not condition:
        raise Refused(reason)


def load(shapes, tensors, strict):
    """Load tensors into a module with parameters of these shapes. Unknown names are an error if `strict`, else they are ignored;
    parameters that the file lacks keep random values; a wrong shape is always an error."""
    unknown = sorted(tensors.keys() - shapes.keys())
    need(not strict or not unknown, f"unknown name {unknown[:1]}")
    generator, held = torch.Generator().manual_seed(99), {}
    for name, shape in shapes.items():
        held[name] = tensors.get(name, torch.randn(shape, generator=generator, dtype=torch.float64))
        need(tuple(held[name].shape) == tuple(shape), f"{name} is {tuple(held[name].shape)}, the module has {shape}")
    return held


# Medusa: x is the last hidden state after the final norm.


def medusa_logits(target, heads, shared=None):
    """heads: [([(W, b)] per block, lm_head)] per head"""
    found = []
    for blocks, lm_head in heads:
        x = target.final
        for weight, bias in blocks:
            x = x + F.silu(x @ weight.T + bias)
        found.append(x @ (shared if lm_head is None else lm_head).T)
    return found


def original_medusa(folder, target):
    """A head is one block, applied `medusa_num_layers` times. There are five heads, whatever the config says; the legacy class, for
    heads that share the target's lm_head, follows the config."""
    config, tensors = config_of(folder), tensors_of(folder, "medusa_lm_head.pt")
    shared = config.get("version") == "2"  # which class it uses
    num_heads = config.get("medusa_num_heads", 4) if shared else 5
    hidden, layers = target.final.shape[1], config.get("medusa_num_layers", 1)
    shapes = {}
    for k in range(num_heads):
        for j in range(layers):
            shapes |= {f"{k}.{j}.linear.weight": (hidden, hidden), f"{k}.{j}.linear.bias": (hidden,)}
        if not shared:
            shapes[f"{k}.{layers}.weight"] = target.lm_head.shape
    held = load(shapes, tensors, strict=False)
    last = layers - 1  # one and the same block: what is loaded last stays
    blocks = [[(held[f"{k}.{last}.linear.weight"], held[f"{k}.{last}.linear.bias"])] * layers for k in range(num_heads)]
    return medusa_logits(
        target, [(blocks[k], held.get(f"{k}.{layers}.weight")) for k in range(num_heads)], target.lm_head
    )


def tgi(folder, target):
    """Heads name the target. With an unknown architecture it silently serves without speculation."""
    config = config_of(folder)
    medusa = "medusa_num_heads" in config
    need(medusa or config.get("model_type") == "mlp_speculator", "it takes this for a model of its own")
    need(config.get("base_model_name_or_path"), "there is no target to serve")
    tensors = tensors_of(folder, "medusa_lm_head.safetensors" if medusa else "model.safetensors")
    if "architectures" in config:
        if config["architectures"][0] != "MLPSpeculatorPreTrainedModel":
            return None
        return tgi_mlp_speculator(config, tensors, target)
    need(medusa, "without architectures it takes this for Medusa heads")
    layers, heads = config["medusa_num_layers"], range(config["medusa_num_heads"])
    try:
        own = [
            (
                [(tensors[f"{k}.{j}.linear.weight"], tensors[f"{k}.{j}.linear.bias"]) for j in range(layers)],
                tensors[f"{k}.{layers}.weight"],
            )
            for k in heads
        ]
    except KeyError:  # then they are taken for heads that share the target's lm_head
        need(layers == 1, "such heads have one block")
        own = [([(tensors[f"{k}.0.linear.weight"], tensors[f"{k}.0.linear.bias"])], None) for k in heads]
    return medusa_logits(target, own, target.lm_head)


def vllm_medusa(folder, target):
    config = config_of(folder)
    need(config.get("model_type") == "medusa", "no model_type that transformers or vLLM knows")
    for key in [key for key in config if "num" in key]:  # the last one of either kind stays
        if "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    need(config["num_heads"] > 0, "no heads")
    hidden, shared = config["hidden_size"], config.get("original_lm_head", False)
    vocab = config.get("truncated_vocab_size") or config["vocab_size"]
    bias, shapes = config.get("medusa_fc_bias", False), {"lm_heads.0.weight": (vocab, hidden)}
    for k in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            shapes[f"blocks.{k}.layers.{j}.weight"] = (hidden, hidden)
            shapes |= {f"blocks.{k}.layers.{j}.bias": (hidden,)} if bias else {}
        shapes |= {} if shared else {f"lm_heads.{k}.weight": (vocab, hidden)}
    held = load(shapes, tensors_of(folder), strict=False)
    heads = []
    for k in range(config["num_heads"]):
        names = [f"blocks.{k}.layers.{j}" for j in range(config["num_hidden_layers"])]
        blocks = [(held[f"{name}.weight"], held.get(f"{name}.bias", 0.0)) for name in names]
        heads.append((blocks, held["lm_heads.0.weight" if shared else f"lm_heads.{k}.weight"]))
    return medusa_logits(target, heads)


# MLP speculator


def ibm_mlp_speculator(folder, target):
    """fms-extras, and vLLM to 0.9: a missing tensor keeps random values, a tied speculator has more than one step."""
    config = {"inner_dim": 0, "n_predict": 3, "top_k_tokens_per_head": [5, 4, 3]} | config_of(folder)
    need(config["architectures"] == ["MLPSpeculatorPreTrainedModel"], "not its class")
    steps, tied = config["n_predict"], config.get("tie_weights", False)
    need(len(config["top_k_tokens_per_head"]) == steps, "top_k_tokens_per_head has another length than n_predict")
    need(not tied or steps > 1, "nothing to tie")
    inner, wide = config["inner_dim"] or config["emb_dim"], config["emb_dim"]
    sizes = {"emb": (config["vocab_size"], inner), "head": (config["vocab_size"], inner)}
    shapes = {}
    for i in range(steps):
        shapes |= {f"{name}.{0 if tied else i}.weight": size for name, size in sizes.items()}
        shapes[f"proj.{min(i, 1) if tied else i}.weight"] = (inner, inner if i else wide)
        shapes |= {f"ln.{0 if tied else i}.{part}": (inner,) for part in ("weight", "bias")}
    tensors = {name.removeprefix("speculator."): one for name, one in tensors_of(folder).items()}
    scaled = config.get("scale_input", False)
    return mlp_speculator_logits(load(shapes, tensors, strict=False), steps, tied, scaled, inner, target)


def tgi_mlp_speculator(config, tensors, target):
    """inner_dim as it stands there; scale_input is not known."""
    steps, tied = config["n_predict"], config.get("tie_weights", False)
    own = range(1 if tied else steps)
    kinds = {"emb": own, "head": own, "proj": range(2 if tied else steps)}
    names = [f"{kind}.{i}.weight" for kind, steps_of in kinds.items() for i in steps_of]
    names += [f"ln.{i}.{part}" for i in own for part in ("weight", "bias")]
    need(all("speculator." + name in tensors for name in names), "a tensor is missing")
    held = {name: tensors["speculator." + name] for name in names}
    return mlp_speculator_logits(held, steps, tied, False, config["inner_dim"], target)


def mlp_speculator_logits(held, steps, tied, scaled, inner, target):
    def unit(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5

    state, found = unit(target.final) / 2**0.5 if scaled else target.final, []
    sw = 0.5 ** (0.5 / steps)
    ew = ((1 - sw**2) * inner / 2) ** 0.5
    for i in range(steps):
        of = 0 if tied else i
        token = held[f"emb.{of}.weight"][target.tokens[:, i]]
        state = state @ held[f"proj.{min(i, 1) if tied else i}.weight"].T + ew / sw * token
        state = F.gelu(held[f"ln.{of}.weight"] * unit(state) + held[f"ln.{of}.bias"])
        found.append(state @ held[f"head.{of}.weight"].T)
    return found


# EAGLE. Rope has two spellings: readers on transformers 5 take rope_parameters, older ones rope_theta and rope_scaling.


def rope_theta(config):
    """The base that readers of either spelling take; other rope types are not written down here."""
    scaling = config.get("rope_scaling")
    old = (config.get("rope_theta", 10000.0), (scaling or {}).get("rope_type", "default"))
    new = config.get("rope_parameters") or {}
    new = (new.get("rope_theta", 10000.0), new.get("rope_type", "default"))
    need(old == new, f"readers do not agree: rope {old} and {new}")
    assert old[1] == "default", "tested with default rope only"
    return float(old[0])


def layer_shapes(config, prefix, width, norms, qkv_bias=False, o_bias=False, head_dim=None):
    hidden, inter, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = head_dim or config.get("head_dim") or hidden // heads
    rows = {"q": heads * head_dim} | dict.fromkeys("kv", config["num_key_value_heads"] * head_dim)
    shapes = {f"{prefix}self_attn.{one}_proj.weight": (rows[one], width) for one in "qkv"}
    shapes |= {f"{prefix}self_attn.{one}_proj.bias": (rows[one],) for one in "qkv" if qkv_bias}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (hidden, rows["q"])}
    shapes |= {f"{prefix}self_attn.o_proj.bias": (hidden,)} if o_bias else {}
    shapes |= {f"{prefix}mlp.{one}_proj.weight": (inter, hidden) for one in ("gate", "up")}
    shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, inter)}
    return shapes | {f"{prefix}{norm}.weight": (hidden,) for norm in norms}


def settings(config, **more):
    names = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    return SimpleNamespace(rope_theta=rope_theta(config), **{name: config[name] for name in names}, **more)


def eagle_logits(config, held, target):
    """All readers of EAGLE heads take the target's lm_head and its embedding."""
    held = held | {"embed_tokens.weight": target.embedding}
    return [eagle_states(held, settings(config), target.final, target.tokens[:, 0]) @ target.lm_head.T]


def without(tensors, *names):
    return {name: one for name, one in tensors.items() if name not in names}


EAGLE_NORMS = ("post_attention_layernorm",)


def vllm_eagle(folder, target):
    config, tensors = config_of(folder), tensors_of(folder)
    need(config["architectures"] == ["LlamaForCausalLM"], "it knows EagleLlamaForCausalLM alone")
    bias = config.get("attention_bias", False) or config.get("bias", False)
    hidden = config["hidden_size"]
    shapes = layer_shapes(config, "layers.0.", hidden, EAGLE_NORMS, config.get("qkv_bias", bias), bias)
    shapes["fc.weight"] = (hidden, 2 * hidden)
    return eagle_logits(config, load(shapes, without(tensors, "embed_tokens.weight"), strict=True), target)


def sglang_eagle(folder, target):
    config, tensors = config_of(folder), tensors_of(folder)
    need(config["architectures"] == ["LlamaForCausalLMEagle"], "it takes this for a whole Llama")
    bias = config.get("attention_bias", False) or config.get("bias", False)
    hidden = config["hidden_size"]
    shapes = layer_shapes(config, "layers.0.", hidden, EAGLE_NORMS, bias, bias)
    shapes |= {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    return eagle_logits(config, load(shapes, tensors, strict=False), target)


def original_eagle(folder, target):
    config, tensors = config_of(folder), tensors_of(folder)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    need(config.get("rope_scaling") is None, "it knows rope scaling by another name")
    need(hidden % heads == 0, "heads x head_dim is not the hidden size")
    shapes = layer_shapes(config, "layers.0.", hidden, EAGLE_NORMS, config.get("qkv_bias"), head_dim=hidden // heads)
    shapes["fc.weight"] = (hidden, 2 * hidden)
    shapes |= {"fc.bias": (hidden,)} if config.get("bias", True) else {}
    return eagle_logits(config, load(shapes, tensors, strict=False), target)


# EAGLE-3

EAGLE3_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def eagle3_shapes(config, prefix, qkv_bias=False):
    hidden = config["hidden_size"]
    width = config.get("num_aux_hidden_states", 3) * config.get("target_hidden_size", hidden)
    shapes = layer_shapes(config, prefix, 2 * hidden, EAGLE3_NORMS, qkv_bias, qkv_bias)
    shapes |= {"fc.weight": (hidden, width), "norm.weight": (hidden,)}
    return shapes | {"lm_head.weight": (config.get("draft_vocab_size") or config["vocab_size"], hidden)}


def eagle3_drafts(config, held, embedding, layers, d2t, target, prefix="midlayer.", norm_before_residual=False):
    names = settings(config, num_aux_layers=len(layers), norm_before_residual=norm_before_residual)
    held = {name.replace(prefix, "midlayer."): one for name, one in held.items()} | {"embed_tokens.weight": embedding}
    need(max(layers) < len(target.streams), f"the target has no layer {max(layers)}")
    features = torch.cat([target.streams[id] for id in layers], -1)
    need(features.shape[-1] == held["fc.weight"].shape[1], f"fc does not take the streams of layers {layers}")
    ids = torch.arange(len(held["lm_head.weight"])) + (0 if d2t is None else d2t)
    found = []
    for state in eagle3_states(held, names, features, target.tokens, target.tokens.shape[1]):
        logits = torch.full((len(features), len(target.lm_head)), ABSENT, dtype=torch.float64)
        found.append(logits.index_copy(1, ids, eagle3_logits(held, names, state)))
    return found


IDS = "eagle_aux_hidden_state_layer_ids"


def vllm_eagle3(folder, target):
    """Both layouts: of a speculators config it takes the layer's part and a few keys beside it."""
    config, tensors = config_of(folder), tensors_of(folder)
    if "speculators_model_type" in config:
        need(config["speculators_model_type"] == "eagle3", "another algorithm")
        need(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"], "nothing to draft")
        top, config = config, dict(config["transformer_layer_config"])
        kept = {key: top[key] for key in ("target_hidden_size", IDS) if top.get(key)}
        config |= kept | {"draft_vocab_size": top.get("draft_vocab_size")}
        config["norm_before_residual"] = top.get("norm_before_residual", True)
    else:
        need(config["architectures"] == ["LlamaForCausalLMEagle3"], "not a class of it")
    need(config.get("model_type") == "llama", "no model_type that transformers knows")
    need(config.get("target_hidden_size", 1) is not None, "target_hidden_size is null")
    layers = config.get(IDS) or (config.get("eagle_config") or {}).get(IDS) or target.default_layers
    tensors = {name.replace("midlayer.", "layers.0."): one for name, one in without(tensors, "t2d").items()}
    d2t, embedding = tensors.pop("d2t", None), tensors.pop("embed_tokens.weight", target.embedding)
    held = load(eagle3_shapes(config, "layers.0.", config.get("attention_bias", False)), tensors, strict=True)
    before = config.get("norm_before_residual", False)
    return eagle3_drafts(config, held, embedding, layers, d2t, target, "layers.0.", before)


def sglang_eagle3(folder, target):
    config, tensors = config_of(folder), tensors_of(folder)
    need(config.get("architectures") == ["LlamaForCausalLMEagle3"], "not a class of it")
    need(config.get("target_hidden_size", 1) is not None, "target_hidden_size is null")
    ids = (config.get("eagle_config") or {}).get(IDS)
    layers = target.default_layers if ids is None else [id + 1 for id in ids]
    held = load(eagle3_shapes(config, "midlayer."), tensors, strict=False)
    same_width = config.get("target_hidden_size", config["hidden_size"]) == config["hidden_size"]
    embedding = target.embedding if same_width else tensors["embed_tokens.weight"]
    if config.get("tie_word_embeddings", True):
        held["lm_head.weight"] = embedding
    return eagle3_drafts(config, held, embedding, layers, tensors.get("d2t"), target)


def speculators_library(folder, target):
    """The library of the layout: heads are as wide as their target, and only `attention_bias` gives q, k and v a bias."""
    config, tensors = config_of(folder), tensors_of(folder)
    need(config.get("speculators_model_type") == "eagle3", "not its layout")
    need(config["speculators_config"]["verifier"]["name_or_path"], "there is no target to load")
    layer, layers = config["transformer_layer_config"], config.get(IDS) or target.default_layers
    sizes = {"num_aux_hidden_states": len(layers), "draft_vocab_size": config["draft_vocab_size"]}
    shapes = eagle3_shapes(layer | sizes, "layers.0.", layer.get("attention_bias", False))
    held, d2t = load(shapes, without(tensors, "d2t"), strict=False), tensors.get("d2t")
    embedding = tensors.get("embed_tokens.weight", target.embedding)
    return eagle3_drafts(
        layer, held, embedding, layers, d2t, target, "layers.0.", config.get("norm_before_residual", False)
    )


def original_eagle3(folder, target):
    """Three layers, and those by default; the target's embedding only where the config has no target_hidden_size."""
    config, tensors = config_of(folder), tensors_of(folder)
    need("num_attention_heads" in config, "the Llama's keys are not at the top level")
    need(config.get("rope_scaling") is None, "it knows rope scaling by another name")
    shapes = eagle3_shapes(config, "midlayer.")
    held = load(shapes | {"embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}, tensors, strict=False)
    own = "embed_tokens.weight" in tensors or "target_hidden_size" in config
    embedding = held["embed_tokens.weight"] if own else target.embedding
    return eagle3_drafts(config, held, embedding, target.default_layers, tensors.get("d2t"), target)
