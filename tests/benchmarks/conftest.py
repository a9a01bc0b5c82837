"""A tiny Llama to measure, and fixtures of other rooms for the tests of benchmarks/."""

from headstart.tests.benchmarks.small_bench import bench, shape, small_measurements  # noqa: F401
from headstart.tests.inference.server.conftest import plain_llm, speculative  # noqa: F401
from headstart.tests.train.conftest import (  # noqa: F401
    arguments,
    conversations,
    launch_nodes,
    make_trainers,
    start,
    trainer,
    trainers,
    word_target,
)
