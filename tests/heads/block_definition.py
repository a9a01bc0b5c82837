"""Block drafters by their definition, block by block and slot by slot, in float64: DFlash, DSpark, DFlash2, sliding layers."""

import math

import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.tests.heads.formats.test_block import SHAPE

V, H, D, T, SIZE = 50, 24, 8, 11, 6
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4, [2] * 11])
POSITIONS = torch.tensor([[*range(7), *range(4)], [*range(30, 41)]])


def make(**changes):
    torch.manual_seed(0)
    head = BlockHead(BlockConfig(**SHAPE | changes))
    for parameter in head.parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if parameter.dim() == 1 else torch.randn_like(parameter) / 4
    head.take_embedding(torch.randn(V, H))
    return head


def inputs():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, T, 3 * H, generator=generator)
    return features, torch.randint(V, (2, T), generator=generator), torch.randn(V, H, generator=generator)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x, positions):
    """x [heads, rows, D], each pair (i, i + D / 2) as a complex number"""
    angles = positions[:, None].double() * 1e6 ** (-torch.arange(0, D, 2).double() / D)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def convolve(w, name, side, read, x):
    """DFlash2's convolution of x [slots, H] where `read` went into the sublayer, slot by slot. side: 0 before it, 1 after it"""
    base, projection = w[f"{name}.base_kernel"][side], w[f"{name}.kernel_projection.weight"]
    taps, groups = len(base), len(projection) // (2 * len(base))
    found = torch.zeros_like(x)
    for slot in range(len(x)):
        corrections = (projection @ read[slot]).view(2, taps, groups)[side]
        for tap in range(min(taps, slot + 1)):
            factors = [base[tap, channel] + corrections[tap, channel * groups // H] for channel in range(H)]
            found[slot] += torch.stack(factors) * x[slot - tap]
    return found


def block_states(head, reaches, features, token, start, size=SIZE):
    """States [size, H] of one block, in float64: `features` [L, 3 H] are those of its context, at positions start, ...

    reaches: (is_causal, window, of_block) of each layer
    """
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    context = norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][torch.tensor([token] + [SHAPE["mask_token_id"]] * (size - 1))]
    x = x * head.config.input_embedding_scale
    length = len(features)
    at_context, at_block = start + torch.arange(length), start + length + torch.arange(size)
    for i in range(SHAPE["num_hidden_layers"]):
        at = f"layers.{i}."
        q, k, v, o = (w[f"{at}self_attn.{one}_proj.weight"] for one in "qkvo")
        y = read = norm(x, w[f"{at}input_layernorm.weight"])
        convolves = f"{at}mlp_conv.base_kernel" in w
        if convolves:
            y = convolve(w, f"{at}attention_conv", 0, read, read)

        def heads(z):
            return z.unflatten(-1, (-1, D)).transpose(0, 1)

        both = torch.cat((context, y))
        queries = turn(norm(heads(y @ q.T), w[f"{at}self_attn.q_norm.weight"]), at_block)
        keys = turn(norm(heads(both @ k.T), w[f"{at}self_attn.k_norm.weight"]), torch.cat((at_context, at_block)))
        values = heads(both @ v.T)
        out = []
        for head_number in range(4):
            scores = queries[head_number] @ keys[head_number // 2].T / D**0.5  # [size, L + size]
            is_causal, window, of_block = reaches[i]
            for slot in range(size):
                if is_causal:
                    scores[slot, length + slot + 1 :] = -torch.inf
                if window is not None:
                    kept = window if of_block else window - 1 - slot  # of the context
                    scores[slot, : max(length - max(kept, 0), 0)] = -torch.inf
            out.append(scores.softmax(-1) @ values[head_number // 2])
        out = torch.cat(out, -1) @ o.T
        x = x + (convolve(w, f"{at}attention_conv", 1, read, out) if convolves else out)
        y = read = norm(x, w[f"{at}post_attention_layernorm.weight"])
        if convolves:
            y = convolve(w, f"{at}mlp_conv", 0, read, read)
        gate, up, down = (w[f"{at}mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
        out = (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        x = x + (convolve(w, f"{at}mlp_conv", 1, read, out) if convolves else out)
    return norm(x, w["norm.weight"])


def shaped(products, config):
    """Logits by lm_head's products, one by one: first the multiplier, then the cap."""
    found, cap = products.clone(), config.final_logit_softcapping
    for place, value in enumerate(products.flatten().tolist()):
        value *= config.output_multiplier
        found.view(-1)[place] = cap * math.tanh(value / cap) if cap else value
    return found


def selected(head, logits, state, before):
    """Scores [V] by DFlash2's selector: of the likeliest tokens, the token before's fit to each; minus infinity for others."""
    w = {name: tensor.double() for name, tensor in head.candidate_selector.state_dict().items()}
    gate = w["predecessor_codebook"][before] * (w["hidden_projection.weight"] @ state)
    found = torch.full_like(logits, -torch.inf)
    for token in sorted(range(V), key=lambda one: -logits[one])[: head.config.selector_top_k]:
        found[token] = logits[token] + gate @ w["successor_codebook"][token]
    return found


def block_logits(head, reaches, features, tokens, start, lm_head):
    """Logits [5, V] of a block whose first slot holds tokens[0], if tokens[1:] are those before its later predictions."""
    size, lm_head = SIZE - head.config.sample_from_anchor, lm_head if head.lm_head is None else head.lm_head.weight
    states = block_states(head, reaches, features, tokens[0], start, size)[size - 5 :]
    logits = shaped(states @ lm_head.double().T, head.config)
    if head.candidate_selector is not None:
        return torch.stack([selected(head, logits[k], states[k], tokens[k]) for k in range(5)])
    if head.markov_head is None:
        return logits
    w1, w2 = head.markov_head.markov_w1.weight.double(), head.markov_head.markov_w2.weight.double()
    return torch.stack([logits[k] + w2 @ w1[tokens[k]] for k in range(5)])


@torch.no_grad()
def largest_error(head, is_causal=False, reaches=None):
    """The largest difference of all predictions of all blocks from the definition, of the largest logit.

    Infinite where other tokens have a score at all.
    """
    reaches = reaches or [(is_causal, None, False)] * 2
    features, tokens, lm_head = inputs()
    predictions = head.predict(features, tokens, POSITIONS, DOCUMENTS, lm_head)
    found = torch.stack([predictions.logits(state, k) for k, state in enumerate(predictions.states)], 1)
    worst, largest = 0.0, 0.0
    for row, begin, end in ((0, 0, 7), (0, 7, 11), (1, 0, 11)):
        for last in range(begin, end - 1):
            read = features[row, begin : last + 1]
            given = torch.cat((tokens[row, last + 1 :], torch.zeros(5, dtype=torch.int64)))  # 0 after the row's end
            wanted = block_logits(head, reaches, read, given, POSITIONS[row, begin], lm_head)
            scored = wanted > -torch.inf
            if not torch.equal(found[row * T + last] > -torch.inf, scored):
                return torch.inf
            worst = max(worst, (found[row * T + last] - wanted)[scored].abs().max().item())
            largest = max(largest, wanted[scored].abs().max().item())
    return worst / largest
