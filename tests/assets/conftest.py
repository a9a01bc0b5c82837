"""Fixtures of other rooms that the tests of the embedded target take."""

from headstart.tests.train.conftest import stdlib_source, stdlib_splits  # noqa: F401
