"""Fixtures of other rooms for the tests of the embedded target."""

from headstart.tests.train.conftest import stdlib_source, stdlib_splits  # noqa: F401
