"""Kernels with a fault put in on purpose: a test that passes on one of these catches nothing."""

import importlib.util
import sys
from pathlib import Path


def mutated(module, before, after, folder):
    """`module` with the one place that reads `before` changed to `after`; `folder`: for its source."""
    text = Path(module.__file__).read_text()
    assert text.count(before) == 1, before
    path = folder / "mutant.py"
    path.write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutant
    spec.loader.exec_module(mutant)
    return mutant
