"""Fixtures of other rooms for the tests of evaluation/."""

from headstart.tests.benchmarks.small_bench import shape  # noqa: F401
from headstart.tests.inference.conftest import head_folder, target_folder  # noqa: F401
