"""Timing of measurements, the share of each kernel, and the names of result files."""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

from headstart.evaluation import results, timing
from headstart.kernels.numerics import NUMERICS

ROOT = Path(__file__).resolve().parents[2]


def test_the_profilers_library_says_nothing_between_the_lines():
    """In a process of its own: the library reads its level once, and other tests use the profiler, too."""
    script = "import torch\nfrom headstart.evaluation.timing import Repeatable\n"
    script += "assert Repeatable(lambda: torch.ones(9) + 1, 'cpu').shares()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ".cpp:" not in done.stdout + done.stderr


def test_percentiles_are_of_the_samples():
    assert timing.Times.of([5, 1, 4, 2, 3, 6]) == timing.Times(2, 3, 5)


def test_waiting_for_the_kernel_before_is_not_a_share_of_time():
    """b starts while a runs and waits for it; c starts after a gap; the second a is over before c ends."""
    found = timing.time_alone([("c", 30, 40), ("a", 0, 10), ("b", 4, 12), ("a", 31, 35)])
    assert found == {"a": 10, "b": 2, "c": 10}


def test_bare_output_name_is_dated_and_kept_with_the_results():
    path = results.result_path("step-h200")
    assert path.parent.parts == ("benchmarks", "results")
    assert path.name.endswith("-step-h200.json")
    assert results.result_path("here.json").name == "here.json"
    assert results.result_path("a/b").parts == ("a", "b")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").iterdir()), ids=lambda path: path.name)
def test_every_result_says_the_same_things(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(found) == results.SCHEMA
    assert date.fromisoformat(found["date"]) <= date.fromisoformat(path.name[:10])
    assert found["hardware"]
    assert found["versions"]["torch"] or found["name"] == "tests"
    assert found["rows"]
    assert all(isinstance(row, dict) for row in found["rows"])


def test_a_report_is_written_as_its_results_are(tmp_path, capsys):
    report = results.Report("name", {}, "cpu", "headstart ...", {"a": 1}, tmp_path / "found.json", commit="0123abc")
    report.rows.append({"x": 1})
    report.finish()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert tuple(found) == results.SCHEMA
    assert found["versions"] == {
        "torch": torch.__version__,
        "triton": results.installed("triton"),
        "numerics": NUMERICS,
    }
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


def test_rows_of_a_report_that_is_cut_are_kept(tmp_path):
    report = results.Report("name", {"x": ("x", 3, results.plain)}, "cpu", "headstart ...", {}, tmp_path / "found.json")
    report.add({"x": 1})
    report.add({"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["found.unfinished.json"]
    kept = json.loads((tmp_path / "found.unfinished.json").read_text(encoding="utf-8"))
    assert tuple(kept) == results.SCHEMA
    assert kept["rows"] == [{"x": 1}, {"x": 2}]
    report.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("_linear_kernel", "_linear_kernel"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
            "vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax_warp<1>(float*)", "softmax_warp"),
    ],
)
def test_kernel_names_are_shortened(kernel, short):
    assert timing.short_name(kernel) == short
