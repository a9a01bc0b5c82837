"""Fixtures of other rooms that the tests of evaluation/ take."""

from headstart.tests.inference.conftest import head_folder, target_folder  # noqa: F401
