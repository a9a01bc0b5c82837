"""Runs every test marked `interpreter` in a process of its own, where Triton kernels run on the CPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_pass_in_the_interpreter():
    here = Path(__file__).parent
    inference = here.parent / "inference"
    files = "models/test_canary.py", "ranks/test_peer_ranks.py", "engine/test_known_rows.py"
    places = map(str, (here, *(inference / name for name in files)))
    found = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-m", "interpreter", *places],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", found.stdout).group(1)) > 0


@pytest.mark.interpreter
def test_types_and_shapes_that_are_looked_up_are_those_of_the_library():
    import triton.language as tl
    from triton.runtime import interpreter

    from headstart.tests import interpreter_patches

    elements = [tl.int1, tl.uint8, tl.int64, tl.bfloat16, tl.float32, tl.float8e5]
    elements += [tl.pointer_type(tl.int32), tl.pointer_type(tl.int32, const=True), tl.pointer_type(tl.int32, 3)]
    for shape in ([4], tl.tuple([2, 8]), [tl.constexpr(2), 8], [8, 2]):
        for element in elements:
            own = object.__new__(tl.block_type)
            interpreter_patches._library_block_type(own, element, shape)
            for _ in range(2):
                found = tl.block_type(element, shape)
                assert found == own
                assert vars(found) == vars(own)
                tensor = tl.tensor("handle", found)
                assert [one.value for one in tensor.shape] == list(own.shape)
                assert (tensor.numel.value, tensor.dtype, tensor.type) == (own.numel, element, own)
                assert interpreter._get_np_dtype(found) == interpreter_patches._library_np_dtype(own)
                assert interpreter._get_np_dtype(element) == interpreter_patches._library_np_dtype(element)
    scalar = tl.tensor("handle", tl.int32)
    assert (len(scalar.shape), scalar.numel.value) == (0, 1)
    for shape, said in (([3], "power of 2"), ([], "0d block_type"), ([4.0], "Shape element 0"), ((8, 2), None)):
        with pytest.raises((ValueError, TypeError, AssertionError), match=said):
            tl.block_type(tl.int32, shape)
