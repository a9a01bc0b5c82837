"""Read a written export back and compare it with the head it came from, bit by bit."""

import torch

from ..heads.checkpoint import load_head, read_tensors
from ..heads.eagle3 import MOST_STEPS
from ..heads.formats import WEIGHT_FILES, family_of, to_file

NUM_ROWS = 4  # of the sample whose outputs are compared


def check_finite(head):
    """ValueError naming the first tensor with a value that is not finite."""
    for name, tensor in head.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds values that are not finite in {str(tensor.dtype).removeprefix('torch.')}")


def compare_with_source(folder, head, format, lm_head_weight=None):
    """Check that `folder` says exactly what `head` says: every file's tensors, the loaded head's, and its logits.

    lm_head_weight: the target's lm_head [V, H] as given to the writer, for heads that share it.
    Raises ValueError naming the first difference. Returns the number of tensors compared in files.
    """
    expected, _ = to_file(head, format, lm_head_weight)
    num_compared = 0
    for path in (folder / name for name in WEIGHT_FILES):
        if not path.is_file():
            continue
        found = read_tensors(path)
        if found.keys() != expected.keys():
            raise ValueError(f"{path.name} read back holds other tensors than were written")
        for name, tensor in expected.items():
            _check_same_bits(f"{path.name}: {name}", found[name], tensor)
        num_compared += len(expected)

    loaded = load_head(folder)
    if loaded.config != head.config:
        raise ValueError(f"the head read back is {loaded.config}, written was {head.config}")
    if loaded.needs_embedding and not head.needs_embedding:
        loaded.take_embedding(head.embed_tokens.weight)  # the target's, which the file leaves out
    for name, tensor in head.state_dict().items():
        _check_same_bits(name, loaded.state_dict()[name], tensor)
    with torch.no_grad():
        outputs = [sample_outputs(one, lm_head_weight) for one in (loaded, head)]
    for depth, (found, wanted) in enumerate(zip(*outputs)):
        _check_same_bits(f"output {depth} of the head", found, wanted)
    return num_compared


def sample_outputs(head, lm_head_weight=None):
    """What a head computes, depth by depth, for features and tokens drawn from a fixed seed.

    lm_head_weight: the target's lm_head [V, H] for heads that share it; drawn, too, where it is None. So is the embedding of
    a head that needs the target's, which is taken away again.
    """
    generator, config = torch.Generator().manual_seed(0), head.config
    dtype = next(head.parameters()).dtype

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    table = draw(config.vocab_size, config.hidden_size)  # [V, H]
    if family_of(head) == "Medusa":
        return head(draw(NUM_ROWS, config.hidden_size), table if lm_head_weight is None else lm_head_weight.to(dtype))[
            0
        ]
    tokens = torch.randint(
        config.vocab_size, (1, NUM_ROWS, head.num_speculative_tokens), generator=generator
    )  # [1, T, S]
    if family_of(head) == "MLP speculator":
        return head(draw(1, NUM_ROWS, config.hidden_size), tokens)[0]
    without = head.needs_embedding
    if without:
        head.take_embedding(table)
    positions, documents = torch.arange(NUM_ROWS)[None], torch.zeros(1, NUM_ROWS, dtype=torch.int64)
    if family_of(head) == "EAGLE":
        found = [head(draw(1, NUM_ROWS, config.hidden_size), tokens[..., 0], positions, documents)]
    else:
        steps = min(head.num_speculative_tokens, MOST_STEPS)
        states = head(draw(1, NUM_ROWS, head.fc.in_features), tokens, positions, documents, steps)
        found = [head.logits(state) for state in states]
    if without:
        head.embed_tokens = None
    return found


def _check_same_bits(name, found, expected):
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    # Compared as bytes: -0.0 differs from 0.0 here, and a NaN equals itself.
    if not same_kind or not torch.equal(*(one.contiguous().view(torch.uint8) for one in (found, expected))):
        raise ValueError(f"{name} read back differs from what was written")
