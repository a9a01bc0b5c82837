"""Read a written export back and compare it with the head it came from, bit by bit."""

import torch

from ..heads.checkpoint import load_head, read_tensors
from ..heads.families import WEIGHT_FILES, to_file
from .replay.replay import compute_outputs, drawn_inputs


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
    inputs = drawn_inputs(head)
    outputs = [compute_outputs(one, inputs) for one in (loaded, head)]
    for depth, (found, wanted) in enumerate(zip(*outputs)):
        _check_same_bits(f"output {depth} of the head", found, wanted)
    return num_compared


def _check_same_bits(name, found, expected):
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    # Compared as bytes: -0.0 differs from 0.0 here, and a NaN equals itself.
    if not same_kind or not torch.equal(*(one.contiguous().view(torch.uint8) for one in (found, expected))):
        raise ValueError(f"{name} read back differs from what was written")
