"""The clock and power of a card: which lines of nvidia-smi count, and that its process ends, whatever happens."""

import subprocess
import sys

import pytest

from headstart.benchmarks import card_state
from headstart.benchmarks.card_state import UNKNOWN, card_limits, state_under

# The first ten lines are those before the power has settled; one is not of numbers, the last one is cut.
LINES = ["1980, 124.5"] * 10 + ["[N/A], 3", "1500, 690", "1400, 694", "1350, 708", "13"]
SAYS = "import time\nprint({!r}, end='', flush=True)\ntime.sleep(60)"


def program(text):
    return [sys.executable, "-c", SAYS.format(text)]


@pytest.fixture
def processes(monkeypatch):
    """nvidia-smi prints LINES and goes on; a list of the processes, which it fills."""
    started = []

    def start(*given, popen=subprocess.Popen, **named):
        started.append(popen(*given, **named))
        return started[-1]

    monkeypatch.setattr(card_state, "_command", lambda device, query, *more: program("\n".join(LINES)))
    monkeypatch.setattr(card_state.subprocess, "Popen", start)
    monkeypatch.setattr(card_state, "SECONDS", 2.0)
    return started


def test_medians_are_of_whole_lines_after_the_power_has_settled(processes):
    calls = []
    assert state_under(lambda: calls.append(1), "cpu") == {"clock": 1400, "watts": 694}
    assert len(calls) >= 10
    assert [process.poll() is not None and process.stdout.closed for process in processes] == [True]


def test_an_error_of_the_work_ends_the_process(processes):
    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        state_under(fail, "cpu")
    assert [process.poll() is not None for process in processes] == [True]


def test_a_cpu_has_neither_state_nor_limits():
    assert state_under(pytest.fail, "cpu") == UNKNOWN
    assert card_limits("cpu") is None


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-c", "print('No devices were found')"]])
def test_a_program_that_says_nothing_useful_is_no_error(monkeypatch, command):
    monkeypatch.setattr(card_state, "_command", lambda device, query, *more: command)
    monkeypatch.setattr(card_state, "SECONDS", 0.1)
    assert state_under(lambda: None, "cpu") == UNKNOWN
    assert card_limits("cpu") is None


def test_limits_are_read(monkeypatch):
    command = [sys.executable, "-c", "print('1980, 700.00')"]
    monkeypatch.setattr(card_state, "_command", lambda device, query, *more: command)
    assert card_limits("cpu") == {"clock": 1980, "watts": 700}
