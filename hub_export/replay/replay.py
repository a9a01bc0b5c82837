"""What a head computes, kept beside an export so that anybody can compute it again (replay.json; hub_export/verify.py does).

Inputs are drawn by a fixed rule (any machine, no target), and, where the target is at hand, are its own features on a few prompts.
Heads compute in float32 on the CPU here, whatever dtype their files hold: what differs between machines is then the order of sums
alone, about 1e-6 of an output's spread, and TOLERANCES stays far above it and far below any wrong maths. Of every output row the
mean, the spread and the WIDTH largest values are kept, not all of them. What is exact is compared exactly: checksums of tensors.

Letters: T rows, S depths, F size of a feature, H hidden size, V vocabulary.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...heads.eagle3 import MOST_STEPS
from ...heads.families import family_of

NUM_ROWS = 4  # of drawn inputs
ROW_STRIDE = 31  # positions between them, so that a wrong rotation shows
WIDTH = 8  # values kept of a row
NUM_PROJECTIONS = 16  # of the target's features
NUM_TARGET_PROMPTS, CONTEXT, NUM_TARGET_ROWS = (
    8,
    32,
    2,
)  # prompts, rows computed of each, and of these the rows that count
EAGLE_STEPS = 3  # an EAGLE head drafts as deep as one likes
# The largest error, in units of an output's spread. 16 bits: the target computed its features in a dtype of so many. For the
# embedded target of 8 layers in bfloat16 instead of float32 it is 0.02 to 0.04, and the features are 0.009 away.
TOLERANCES = {"drawn": 1e-3, "32 bits": 1e-3, "16 bits": 0.3}
# Of the target's features, in units of their length. Another target's have nothing to do with them: about 1.4.
FEATURE_TOLERANCES = {"32 bits": 1e-3, "16 bits": 0.15}


@dataclass(frozen=True)
class Inputs:
    """What a head reads over T rows.  lm_head and embedding [V, H]: the target's, None where it is not needed."""

    features: torch.Tensor  # [1, T, F]
    tokens: torch.Tensor  # [1, T, S] those at t + 1 to t + S
    positions: torch.Tensor  # [1, T]
    documents: torch.Tensor  # [1, T]
    rows: torch.Tensor  # those whose outputs count
    lm_head: torch.Tensor | None = None
    embedding: torch.Tensor | None = None


def draw(shape, stream, dtype=torch.float32):
    """Numbers of mean 0 and variance 1 that are the same on every machine and with every version: a hash of their places."""
    values = torch.empty(torch.Size(shape).numel(), dtype=dtype)
    for first in range(0, len(values), 1 << 22):  # int64 of a whole table would be twice its size
        part = values[first : first + (1 << 22)]
        # Uniform over 2^32 values, stretched to variance 1.
        part.copy_((_hash(torch.arange(first, first + len(part)), stream) / 2**31 - 1) * 3**0.5)
    return values.view(shape)


def draw_tokens(shape, vocab_size, stream):
    """int64 tokens below `vocab_size`, the same everywhere."""
    return (_hash(torch.arange(torch.Size(shape).numel()), stream) % vocab_size).view(shape)


def _hash(places, stream):
    """32 bits of every place, int64 (the finaliser of MurmurHash3)."""
    x = (places + 0x9E3779B9 * (stream + 1)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x


def num_depths(head):
    """How many of a head's depths are computed."""
    most = {"EAGLE": EAGLE_STEPS, "EAGLE-3": MOST_STEPS}.get(family_of(head).name, head.num_speculative_tokens)
    return min(head.num_speculative_tokens, most)


def needs_lm_head(head):
    """Whether the target's lm_head makes its logits."""
    return family_of(head).name == "EAGLE" or (family_of(head).name == "Medusa" and head.config.shared_lm_head)


def drawn_inputs(head):
    """Inputs that need no target; an EAGLE head's outputs are then its states, which have as many values as its features."""
    config, dtype = head.config, next(head.parameters()).dtype
    size = head.fc.in_features if family_of(head).name == "EAGLE-3" else config.hidden_size
    table = None
    if head.needs_embedding or (needs_lm_head(head) and family_of(head).name != "EAGLE"):
        table = draw((config.vocab_size, config.hidden_size), 0, dtype)
    return Inputs(
        draw((1, NUM_ROWS, size), 1, dtype),
        draw_tokens((1, NUM_ROWS, num_depths(head)), config.vocab_size, 2),
        torch.arange(NUM_ROWS)[None] * ROW_STRIDE,
        torch.zeros(1, NUM_ROWS, dtype=torch.int64),
        torch.arange(NUM_ROWS),
        lm_head=table,
        embedding=table,
    )


@torch.no_grad()
def compute_outputs(head, inputs):
    """What a head computes, depth by depth: tensors [rows, V], or an EAGLE head's states [rows, H] without a lm_head."""
    family, rows = family_of(head).name, inputs.rows
    if family == "Medusa":
        return head(inputs.features[0, rows], inputs.lm_head)[0]
    if family == "MLP speculator":
        return head(inputs.features[0, rows], inputs.tokens[0, rows])[0]
    lacking, taken = head.needs_embedding, head.embedding_is_targets
    if lacking:
        head.take_embedding(inputs.embedding)
    try:
        if family == "EAGLE-3":
            packed = inputs.features, inputs.tokens, inputs.positions, inputs.documents
            return [head.logits(state[0, rows]) for state in head(*packed, inputs.tokens.shape[-1])]
        state, found = inputs.features, []
        for step in range(inputs.tokens.shape[-1]):
            state = head(state, inputs.tokens[..., step], inputs.positions + step, inputs.documents)
            chosen = state[0, rows]
            found.append(chosen if inputs.lm_head is None else F.linear(chosen, inputs.lm_head))
        return found
    finally:
        if lacking:
            head.embed_tokens, head.embedding_is_targets = None, taken


def describe(outputs):
    """Outputs as replay.json keeps them: per depth, per row the mean, the spread, and the largest values with their places."""
    described = []
    for output in outputs:
        top = output.topk(min(WIDTH, output.shape[-1]))
        row = {"mean": output.mean(-1), "spread": output.std(-1), "values": top.values}
        described.append({name: rounded(values) for name, values in row.items()} | {"places": top.indices.tolist()})
    return described


def largest_errors(outputs, described):
    """Per depth, how far outputs are from those that were described, in units of their spread.

    ValueError where they have other depths or rows, or too few values.
    """
    errors = []
    if len(outputs) != len(described):
        raise ValueError(f"the head computes {len(outputs)} depths, the export was made of one with {len(described)}")
    for output, wanted in zip(outputs, described):
        places = torch.tensor(wanted["places"])
        if len(places) != len(output) or int(places.max()) >= output.shape[-1]:
            raise ValueError(
                f"the head computes {list(output.shape)} values, the export's were {len(places)} rows of more than {places.max()}"
            )
        mean, spread, values = (torch.tensor(wanted[name]) for name in ("mean", "spread", "values"))
        apart = torch.cat(
            (
                (output.gather(-1, places) - values).abs().amax(-1, keepdim=True),
                (output.mean(-1) - mean).abs()[:, None],
                (output.std(-1) - spread).abs()[:, None],
            ),
            -1,
        )
        errors.append(float((apart.amax(-1) / spread.clamp_min(1e-6)).max()))
    return errors


def project(features):
    """A few numbers that tell features [R, F] from others: their products with fixed directions.  -> [R, P]"""
    return features @ draw((features.shape[-1], NUM_PROJECTIONS), 3) / features.shape[-1] ** 0.5


def distance(found, wanted):
    """How far projections are from others, in units of the latter's length."""
    return float((found - wanted).norm() / wanted.norm())


def checksums(head):
    """{name: checksum} of a head's tensors: of their dtype, shape and bits."""
    found = {}
    for name, tensor in head.state_dict().items():
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        found[name] = digest.hexdigest()[:16]
    return found


def rounded(values):
    """A tensor as lists of numbers of seven digits, which is all that float32 holds."""
    values = values.tolist() if isinstance(values, torch.Tensor) else values
    return [rounded(one) for one in values] if isinstance(values, list) else float(f"{values:.7g}")
