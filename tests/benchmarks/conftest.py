"""Fixtures of other rooms that the tests of benchmarks/ take."""

from headstart.tests.train.conftest import arguments, conversations, launch_nodes, word_target  # noqa: F401
