"""Published Medusa heads: FasterDecoding's layouts and vLLM's."""

import re

import torch

from headstart.tests.heads.published_file import FEATURES, Published, draw, prefixed, wide
from headstart.tests.heads.test_eagle import LM_HEAD, H, V


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
