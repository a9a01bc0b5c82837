"""Fixtures of other rooms for the tests of commands/."""

from headstart.tests.inference.conftest import head_folder, llm, target_folder  # noqa: F401
