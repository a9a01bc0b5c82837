"""The clock and power of a card: which lines of nvidia-smi count, and that its process ends, whatever happens."""

import subprocess
import sys

import pytest

from headstart.benchmarks import card_state
from headstart.benchmarks.card_state import state_text, state_under

# The first ten lines are those before the power has settled; one is not of numbers, one too short, the last one is cut.
LINES = ["1980, 124.5, 1980, 700"] * 10 + ["[N/A], 3, 1980, 700", "1, 2"]
LINES += ["1500, 690, 1980, 700", "1400, 694, 1980, 700", "1350, 708, 1980, 700", "13, 709, 1980, 7"]
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

    monkeypatch.setattr(card_state, "_command", lambda device: program("\n".join(LINES)))
    monkeypatch.setattr(card_state.subprocess, "Popen", start)
    monkeypatch.setattr(card_state, "SECONDS", 2.0)
    return started


def test_medians_are_of_whole_lines_after_the_power_has_settled(processes):
    calls = []
    state = state_under(lambda: calls.append(1), "cpu")
    assert state == {"clock": 1400, "watts": 694, "max_clock": 1980, "max_watts": 700}
    assert state_text(state) == " at 1400 MHz and 694 W (limits: 1980 MHz, 700 W)"
    assert len(calls) >= 10
    assert [process.poll() is not None and process.stdout.closed for process in processes] == [True]


def test_an_error_of_the_work_ends_the_process(processes):
    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        state_under(fail, "cpu")
    assert [process.poll() is not None for process in processes] == [True]


def test_a_cpu_has_no_state():
    assert state_under(pytest.fail, "cpu") == {}
    assert state_text({}) == ""


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-c", "print('No devices were found')"]])
def test_a_program_that_says_nothing_useful_is_no_error(monkeypatch, command):
    monkeypatch.setattr(card_state, "_command", lambda device: command)
    monkeypatch.setattr(card_state, "SECONDS", 0.1)
    assert state_under(lambda: None, "cpu") == {}
