"""Fixtures of other rooms that the tests of commands/ take."""

from headstart.tests.inference.conftest import head_folder, llm, target_folder  # noqa: F401
