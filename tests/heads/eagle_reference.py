"""Independent implementation of EAGLE heads for the tests, row by row and without code of heads/.

Weights are read by the names in published files. `mutant` names a mistake to make, so that tests can show that it would be seen.
"""

import math

import torch


def rms(x, weight, eps):
    return x / (x.pow(2).sum(-1) / x.shape[-1] + eps).sqrt()[..., None] * weight


def rope(x, position, theta):
    """x [heads, D]: pair (j, j + D/2) is a complex number, turned by position * theta^(-2j/D)."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * position * frequencies.double())
    return torch.cat((turned.real, turned.imag), -1)


def project(x, weights, name, heads=None):
    y = weights[name + ".weight"] @ x + weights.get(name + ".bias", 0.0)
    return y if heads is None else y.view(heads, -1)


def attend(q, keys, values):
    """q [HQ, D], keys and values [n] of [HK, D] -> [HQ D]"""
    found = []
    for head in range(len(q)):
        shared = head * len(keys[0]) // len(q)
        scores = torch.stack([q[head] @ k[shared] for k in keys]) / math.sqrt(q.shape[-1])
        found.append(sum(share * v[shared] for share, v in zip(scores.softmax(0), values)))
    return torch.cat(found)


def layer_rows(inputs, residuals, config, weights, prefix, positions, seen):
    """One step of a decoder layer over the rows of one document.

    inputs, residuals: the row's vectors; seen: [(keys, values)] by row of the steps before, whose first entry is step 0.
    Returns the rows' outputs; `seen` gets this step's keys and values.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    name = prefix + "self_attn."
    keys = [
        rope(project(x, weights, name + "k_proj", kv_heads), p, config.rope_theta) for x, p in zip(inputs, positions)
    ]
    values = [project(x, weights, name + "v_proj", kv_heads) for x in inputs]
    seen.append((keys, values))
    outputs = []
    for row, (x, residual) in enumerate(zip(inputs, residuals)):
        q = rope(project(x, weights, name + "q_proj", heads), positions[row], config.rope_theta)
        visible = [list(part[: row + 1]) for part in seen[0]]
        for later in seen[1:]:
            visible = [some + [part[row]] for some, part in zip(visible, later)]
        a = residual + project(attend(q, *visible), weights, name + "o_proj")
        n = rms(a, weights[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (project(n, weights, f"{prefix}mlp.{one}_proj") for one in ("gate", "up"))
        outputs.append(a + project(gate / (1 + torch.exp(-gate)) * up, weights, prefix + "mlp.down_proj"))
    return outputs


def eagle_states(weights, config, features, next_tokens, mutant=None):
    """EAGLE-1 over one document: features [T, H], next_tokens [T] -> [T, H]"""
    inputs = []
    for f, token in zip(features, next_tokens):
        e = weights["embed_tokens.weight"][token]
        inputs.append(project(torch.cat((f, e) if mutant == "features first" else (e, f)), weights, "fc"))
    normed = [rms(u, 1.0, config.rms_norm_eps) for u in inputs]
    fed = normed if mutant == "input norm" else inputs
    residuals = normed if mutant == "residual normed" else inputs
    positions = [0 if mutant == "no positions" else t for t in range(len(inputs))]
    return torch.stack(layer_rows(fed, residuals, config, weights, "layers.0.", positions, []))


def eagle3_states(weights, config, features, tokens, num_steps, mutant=None):
    """EAGLE-3 over one document: features [T, A HT], tokens [T, S] -> num_steps tensors [T, H]"""
    if mutant == "features reversed":
        features = torch.cat(features.chunk(config.num_aux_layers, -1)[::-1], -1)
    states, seen, found = [project(f, weights, "fc") for f in features], [], []
    for step in range(num_steps):
        inputs, residuals = [], []
        for t, g in enumerate(states):
            e = weights["embed_tokens.weight"][tokens[t, 0 if mutant == "first token again" else step]]
            e = rms(e, weights["midlayer.input_layernorm.weight"], config.rms_norm_eps)
            n = rms(g, weights["midlayer.hidden_norm.weight"], config.rms_norm_eps)
            inputs.append(torch.cat((n, e) if mutant == "state first" else (e, n)))
            normed = config.norm_before_residual != (mutant == "other residual")
            residuals.append(n if normed else g)
        positions = [t + (0 if mutant == "position t" else step) for t in range(len(states))]
        states = layer_rows(inputs, residuals, config, weights, "midlayer.", positions, seen)
        if mutant == "only step 0 seen":
            del seen[1:]
        if mutant == "step 0 forgotten":
            del seen[:-1]
        found.append(torch.stack(states))
        if mutant == "norm in the loop":
            states = [rms(s, weights["norm.weight"], config.rms_norm_eps) for s in states]
    return found


def eagle3_logits(weights, config, states, mutant=None):
    if mutant != "logits before norm":
        states = rms(states, weights["norm.weight"], config.rms_norm_eps)
    return states @ weights["lm_head.weight"].T
