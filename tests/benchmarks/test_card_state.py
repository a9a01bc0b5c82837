"""The clock and power of a card: which lines of nvidia-smi count, which samples belong to a span, when the process ends."""

import sys
import time

import pytest

from headstart.benchmarks import card_state
from headstart.benchmarks.card_state import CardState, read_values

LINES = "import time\nprint('1980, 124.5', '[N/A], 3', '1500, 690', '1400, 694', sep='\\n', flush=True)\ntime.sleep(60)"


@pytest.fixture
def commands(monkeypatch):
    """nvidia-smi is a program that prints four lines and goes on; a list of the options asked for."""
    asked = []

    def command(device, query, *more):
        asked.append((device, query, *more))
        return [sys.executable, "-c", LINES]

    monkeypatch.setattr(card_state, "card_command", command)
    return asked


def samples_of(card, count):
    """Wait for so many samples.  -> their times"""
    for _ in range(3000):
        if len(card._samples) >= count:
            return [when for when, *_ in card._samples]
        time.sleep(0.01)
    pytest.fail(f"{len(card._samples)} samples of {count}")


def test_a_span_has_the_medians_of_its_samples_and_the_process_ends_with_the_context(commands):
    with CardState("cuda") as card:
        first, *_, last = samples_of(card, 3)
        assert card.between(first, last) == {"clock": 1500, "watts": 690}
        assert card.between(last, last) == {"clock": 1400, "watts": 694}
        assert card.between(last + 1, last + 2) == {"clock": None, "watts": None}
        assert card._process.poll() is None
    assert card._process.poll() is not None
    assert commands == [("cuda", "clocks.sm,power.draw.instant", "--loop-ms=100")]


def test_a_cpu_has_no_samples():
    with CardState("cpu") as card:
        assert card.between(0, time.perf_counter()) == {"clock": None, "watts": None}
    assert card_state.card_limits("cpu") is None


@pytest.mark.parametrize("line", ["", "No devices were found\n", "[N/A], 690.1\n", "1, 2, 3\n"])
def test_other_lines_say_nothing(line):
    assert read_values(line) is None


def test_an_error_in_the_context_ends_the_process(commands):
    with pytest.raises(KeyError), CardState("cuda") as card:
        raise KeyError
    assert card._process.poll() is not None
