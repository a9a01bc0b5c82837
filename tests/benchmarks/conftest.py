"""A tiny Llama to measure, and fixtures of other rooms for the tests of benchmarks/."""

from headstart.tests.benchmarks.small_bench import bench, shape, small_measurements  # noqa: F401
from headstart.tests.train.conftest import arguments, conversations, launch_nodes, word_target  # noqa: F401
