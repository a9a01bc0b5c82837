"""Checks that every file format makes of its tensors, and the words of their errors."""

import torch

from .user_errors import list_names

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights


def check_names(expected, found):
    """ValueError listing missing and unexpected names, unless both hold the same."""
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    if missing or unexpected:
        parts = [f"missing: {list_names(missing)}"] if missing else []
        parts += [f"unexpected: {list_names(unexpected)}"] if unexpected else []
        raise ValueError(f"tensor names do not fit; {'; '.join(parts)}")


def check_tensors(tensors, shapes):
    """ValueError naming the fault, unless `tensors` are weights (DTYPES) of exactly these names and shapes.

    tensors: {name: tensor}; shapes: {name: shape}.
    """
    check_names(shapes, tensors)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(f"tensor {name} is {tuple(tensor.shape)}, expected {tuple(shapes[name])}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name} is {tensor.dtype}, expected floating point: float32, bfloat16 or float16")


def shape_of(tensors, name, num_axes=2):
    """The shape of a tensor from which sizes are read; ValueError if the tensor is missing or has another number of axes."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != num_axes:
        found = "missing" if tensor is None else f"{tuple(tensor.shape)}"
        axes = {1: "one axis", 2: "two axes", 3: "three axes"}[num_axes]
        raise ValueError(f"tensor {name} is {found}, expected {axes}; the file holds {list_names(tensors)}")
    return tuple(tensor.shape)
