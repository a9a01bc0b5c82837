"""The losses of every family by their definition, in fp64, one document and one position at a time: no packing, chunks or labels.

Nothing of heads/, kernels/ or train/loss/ computes here. Letters: T tokens of a document, H hidden size, V vocabulary, K steps.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.heads.checkpoint import load_head
from headstart.tests.heads.eagle_reference import attend, eagle3_logits, eagle3_states, layer_rows, project, rms, rope
from headstart.tests.train.tiny_runs import head_tensors
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations


@dataclass
class Document:
    """A conversation as the target sees it."""

    ids: list
    marks: list  # which tokens are supervised
    streams: tuple  # [T, H] each: what enters every layer, and the last hidden state
    distribution: torch.Tensor  # [T, V] of the target

    @property
    def features(self):
        return self.streams[-1]

    def tokens(self, step):
        """The token at t + 1 + step for every t; past the end the last one, which no label depends on."""
        return [self.ids[min(t + 1 + step, len(self.ids) - 1)] for t in range(len(self.ids))]


@dataclass
class Sums:
    """Per step k: sums over its labels, which are fewer than the supervised ones where a draft vocabulary misses some."""

    losses: list
    feature_losses: list
    labels: list
    counts: list


def read_documents(model, target, data):
    """The Documents of the conversations in `data`."""
    found, tokenizer = [], AutoTokenizer.from_pretrained(target)
    for ids, marks in encode_conversations(tokenizer, load_conversations(data)):
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        streams = tuple(stream[0] for stream in out.hidden_states)
        found.append(Document(ids, marks, streams, out.logits[0].softmax(-1)))
    return found


# ---- what the steps of each family say of a document: pairs (log q [T, V], the states [T, H] that are features, or None) ----


def plain_steps(document, model, head, tensors):
    """Of heads that are still the identity: the target's own distribution, for later tokens."""
    return [(model.lm_head(document.features).log_softmax(-1), None)] * 3


def medusa_steps(document, model, head, tensors):
    steps, own = [], {name: weight.double() for name, weight in head.state_dict().items()}
    for k in range(3):
        state = document.features
        for r in range(head.config.num_layers):
            name = f"heads.{k}.blocks.{r}.linear"
            inner = state @ own[f"{name}.weight"].T + own[f"{name}.bias"]
            state = state + inner / (1 + torch.exp(-inner))
        lm_head = own.get(f"heads.{k}.lm_head.weight", model.lm_head.weight)
        steps.append(((state @ lm_head.T).log_softmax(-1), None))
    return steps


def mlp_speculator_steps(document, model, head, tensors):
    """Written from the paper's formulae; tensors: the file's."""
    w = {key.removeprefix("speculator."): value for key, value in tensors.items()}
    sw = 0.5 ** (0.5 / 3)
    ew = math.sqrt((1 - sw**2) * 24 / 2)
    found = [[], [], []]
    for t, state in enumerate(document.features):
        if head.config.scale_input:
            state = state / torch.sqrt(state.square().mean() + 1e-6) / math.sqrt(2)
        for i in range(3):
            own, proj = (0, min(i, 1)) if head.config.tie_weights else (i, i)
            token = document.tokens(i)[t]
            state = w[f"proj.{proj}.weight"] @ state + (ew / sw) * w[f"emb.{own}.weight"][token]
            state = state / torch.sqrt(state.square().mean() + 1e-6) * w[f"ln.{own}.weight"] + w[f"ln.{own}.bias"]
            state = 0.5 * state * (1 + torch.erf(state / math.sqrt(2)))
            found[i].append((w[f"head.{own}.weight"] @ state).log_softmax(-1))
    return [(torch.stack(one), None) for one in found]


def eagle_steps(document, model, head, tensors):
    steps, seen, states = [], [], document.features
    embedding = model.get_input_embeddings().weight
    for i in range(2):
        pairs = [project(torch.cat((embedding[x], s)), tensors, "fc") for x, s in zip(document.tokens(i), states)]
        positions = [t + i for t in range(len(pairs))]
        states = torch.stack(layer_rows(pairs, pairs, head.config, tensors, "layers.0.", positions, seen))
        steps.append((model.lm_head(states).log_softmax(-1), states))
    return steps


def eagle3_steps(document, model, head, tensors):
    w = tensors | {"embed_tokens.weight": model.get_input_embeddings().weight}
    streams = torch.cat([document.streams[layer] for layer in head.features], -1)
    tokens = torch.tensor([document.tokens(i) for i in range(3)]).T
    steps = eagle3_states(w, head.config, streams, tokens, 3)
    return [(eagle3_logits(w, head.config, states).log_softmax(-1), None) for states in steps]


def block_steps(document, model, head, w):
    """A block after every token, one slot at a time; w: the file's tensors."""
    config, embedding = head.config, model.get_input_embeddings().weight
    sizes, eps = (config.num_attention_heads, config.num_key_value_heads), config.rms_norm_eps
    streams = torch.cat([document.streams[layer] for layer in head.features], -1)
    context = [rms(project(one, w, "fc"), w["hidden_norm.weight"], eps) for one in streams]

    def turned(x, name, heads, position):
        normed = rms(project(x, w, f"{name}_proj", heads), w[f"{name}_norm.weight"], eps)
        return rope(normed, position, config.rope_theta)

    def keys(rows, at, start):
        k = [turned(x, f"{at}self_attn.k", sizes[1], start + i) for i, x in enumerate(rows)]
        return k, [project(x, w, f"{at}self_attn.v_proj", sizes[1]) for x in rows]

    layers = [f"layers.{i}." for i in range(config.num_hidden_layers)]
    of_context, found = [keys(context, at, 0) for at in layers], [[], [], []]
    for t, token in enumerate(document.tokens(0)):
        block = [embedding[token], *[embedding[config.mask_token_id]] * 3]
        for at, (k, v) in zip(layers, of_context):
            normed = [rms(x, w[f"{at}input_layernorm.weight"], eps) for x in block]
            own = keys(normed, at, t + 1)
            seen = k[: t + 1] + own[0], v[: t + 1] + own[1]
            for i, (x, y) in enumerate(zip(block, normed)):
                q = turned(y, f"{at}self_attn.q", sizes[0], t + 1 + i)
                x = x + project(attend(q, *seen), w, f"{at}self_attn.o_proj")
                n = rms(x, w[f"{at}post_attention_layernorm.weight"], eps)
                gate, up = (project(n, w, f"{at}mlp.{one}_proj") for one in ("gate", "up"))
                block[i] = x + project(gate / (1 + torch.exp(-gate)) * up, w, f"{at}mlp.down_proj")
        for k, x in enumerate(block[1:]):
            before = w["markov_head.markov_w1.weight"][document.tokens(k)[t]]
            edge = w["markov_head.markov_w2.weight"] @ before
            found[k].append((model.lm_head(rms(x, w["norm.weight"], eps)) + edge).log_softmax(-1))
    return [(torch.stack(one), None) for one in found]


STEPS = {"plain": plain_steps, "medusa": medusa_steps, "mlp_speculator": mlp_speculator_steps}
STEPS |= {"eagle": eagle_steps, "eagle3": eagle3_steps, "block": block_steps}


# ---- the losses ----


def losses_by_definition(family, folder, target, data, **keys):
    """(Sums, the Sums with labels and distributions of the tokens one later) of the head in the run `folder`.

    family: a name of STEPS; keys: loss, lk_eta, hass_weight, hass_top of the recipe.
    """
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(target).double()
        head, tensors = load_head(folder / "head"), head_tensors(folder)
        tensors = {name: one.double() if one.is_floating_point() else one for name, one in tensors.items()}
        drafted = list(range(48))
        if "d2t" in tensors:
            drafted = [i + shift for i, shift in enumerate(tensors["d2t"].tolist())]
        documents = read_documents(model, target, data)
        steps = [STEPS[family](document, model, head, tensors) for document in documents]
        sums = partial(sum_losses, documents, steps, drafted, anchored=family == "block", **keys)
        return sums(shift=0), sums(shift=1)


def sum_losses(documents, steps, drafted, *, shift, loss, anchored=False, lk_eta=0, hass_weight=0, hass_top=0):
    """drafted: the tokens of the draft vocabulary; anchored: only roots count whose next two tokens are supervised."""
    num_steps = len(steps[0])
    sums = Sums(*([0.0] * num_steps for _ in range(4)))
    alphas, likely_losses = [0.0] * num_steps, [0.0] * num_steps
    for document, found in zip(documents, steps):
        ids = document.ids
        for i, (every_log_q, states) in enumerate(found):
            for t in range(len(ids) - 2 - i):
                y = t + 2 + i
                if not document.marks[y] or (anchored and not all(document.marks[t + 1 : t + 3])):
                    continue
                sums.labels[i] += 1
                y = min(y + shift, len(ids) - 1)
                # Of all the distribution, not of the draft vocabulary's part of it alone.
                p, log_q = document.distribution[y - 1][drafted], every_log_q[t]
                if loss == "hard" and ids[y] not in drafted:
                    continue
                alpha = torch.minimum(p, log_q.exp()).sum()
                alphas[i] += float(alpha)
                if loss == "hard":
                    value = -log_q[drafted.index(ids[y])]
                else:
                    value = -alpha.log() if loss == "lk-log" else (p * (p.log() - log_q)).sum()
                sums.losses[i] += float(value)
                if hass_weight:
                    likely = p.argsort(descending=True)[:hass_top]
                    likely_losses[i] -= hass_weight * float((p[likely] * log_q[likely]).sum())
                if states is not None:
                    sums.feature_losses[i] += float(F.smooth_l1_loss(states[t], document.features[y - 1]))
                sums.counts[i] += 1
    if loss == "lk":  # of the second step, which knows the first one's rates of acceptance
        weights = [math.exp(-lk_eta * alpha / count) for alpha, count in zip(alphas, sums.counts)]
        known = zip(weights, sums.losses, sums.counts, alphas)
        sums.losses = [w * kl + (1 - w) * (count - alpha) for w, kl, count, alpha in known]
    sums.losses = [one + likely for one, likely in zip(sums.losses, likely_losses)]
    return sums
