"""benchmarks/headline/page.py on made-up results: what its tables, verdicts and chart say, and which results it refuses."""

import copy
import json

import pytest

from headstart.benchmarks.headline import page
from headstart.benchmarks.headline.families import SOURCES
from headstart.benchmarks.headline.page_tables import Figures, claims, difference, judge

LENGTHS = {
    "EAGLE-3": 30,
    "EAGLE": 25,
    "MLP speculator": 18,
    "Medusa": 15,
    "EAGLE-3, LK": 31,
    "Medusa, LK": 14,
    "n-gram": 12,
}
PROMPTS = 6


def acceptance_row(source, draft, subject, temperature, batch, tokens):
    """A row of 10 steps a prompt, which make about `tokens` tokens."""
    made = [tokens + i % 2 for i in range(PROMPTS)]
    length = sum(made) / (10 * PROMPTS)
    return {
        "table": "acceptance",
        "source": source,
        "draft": draft,
        "nodes": 6 if draft == "chain" else 64,
        "depth": 5,
        "subject": subject,
        "temperature": temperature,
        "batch": batch,
        "acceptance_length": length,
        "low": length - 0.06,
        "high": length + 0.06,
        "steps": 10 * PROMPTS,
        "prompts": PROMPTS,
        "tokens": sum(made),
        "other_outputs": 0,
        "best_tree": draft == "grown tree",
        "steps_by_prompt": " ".join(["10"] * PROMPTS),
        "tokens_by_prompt": " ".join(map(str, made)),
    }


def made_up(seed, more=0, speed=True):
    """The result of one seed; more: further tokens in ten steps of everything."""
    rows, places = [], [(subject, temperature) for subject in ("code", "mathematics") for temperature in (0.0, 1.0)]
    for subject, temperature in places:
        for source, tokens in LENGTHS.items():
            has_trees = "LK" not in source and source != "n-gram"
            for draft, further in (("chain", 0), ("grown tree", 9)) if has_trees else (("chain", 0),):
                for batch in (1, 64):
                    rows.append(acceptance_row(source, draft, subject, temperature, batch, tokens + further + more))
        if speed:
            one = {
                "table": "speed",
                "source": "EAGLE-3",
                "draft": "chain",
                "subject": subject,
                "temperature": temperature,
            }
            rows.append(one | {"batch": 1, "tokens_per_second": 450.0 + 50 * seed, "speedup": 1.8 + 0.2 * seed})
    training = {"num_parameters": 134_800_000, "seconds": 270, "num_steps": 1500, "passes": 2.0, "num_tokens": 5e7}
    bits = {"code": {"answer_bits_per_byte": 0.512}, "mathematics": {"answer_bits_per_byte": 0.731}}
    head = {"name": "EAGLE-3", "minutes": 1.01, "steps": 900, "tokens": 14_000_000}
    plain = {"1": {"tokens_per_second": 250.0}, "64": {"tokens_per_second": 9000.0}}
    return {
        "name": "headline",
        "commit": "abc",
        "settings": {"seed": seed, "depth": 5, "batch": 64, "nodes": 64, "prompts": 6, "alone": 6, "head_minutes": 1.0}
        | {"shape": "llama-3-8b", "speed_prompt": 1000, "speed_tokens": 256, "device": "auto"},
        "facts": {
            "target": {"training": training, "bits_per_byte": bits, "hardware": "NVIDIA H200"},
            "answers": {"answered": 32000},
            "heads": {"eagle-3": head},
            "acceptance": {"eagle-3": {"plain_other_outputs": 0}},
            "speed": {"eagle-3": {"plain": plain, "hardware": "NVIDIA H200"}} if speed else {},
            "commands": ["python benchmarks/headline/headline.py --seed 0"],
        },
        "rows": rows,
    }


@pytest.fixture
def write(tmp_path):
    """Write results, run page.py on them.  -> the page"""

    def run(*results):
        paths = []
        for number, result in enumerate(results):
            paths.append(tmp_path / f"result-{number}.json")
            paths[-1].write_text(json.dumps(result))
        assert page.main([*map(str, paths), "--folder", str(tmp_path)]) == 0
        return (tmp_path / "benchmarks.md").read_text()

    return run


def line(text, begins):
    """The cells of the first line of a table that begins so."""
    found = next(one for one in text.splitlines() if one.startswith(f"| {begins} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_tables_hold_both_seeds_and_say_whether_they_agree(write, tmp_path):
    text = write(made_up(1, more=1), made_up(0))
    # 3.05 and 3.15 with 0.06 on either side: the intervals meet; the whole goes from 2.99 to 3.21
    assert line(text, "EAGLE-3")[1] == "3.10 (2.99 to 3.21)"
    assert line(text, "EAGLE-3")[2] == "4.00 (3.89 to 4.11, grown)"
    assert line(text, "EAGLE-3")[-1] == "4 of 4"
    assert line(text, "n-gram")[2] == ""
    assert line(text, "0 | target")[2:] == ["4.50", "1,500", "100,000,000", "code 0.512, mathematics 0.731"]
    assert line(text, "EAGLE-3, chain")[1:3] == ["1", "450 to 500, 1.80 to 2.00x"]
    assert line(text, "plain decoding")[2] == "250"
    assert "none differs from plain decoding" in text
    assert "135 million parameters" in text
    drawing = (tmp_path / "benchmarks.svg").read_text()
    assert drawing.count('class="interval"') == 11
    apart = write(made_up(0), made_up(1, more=4))
    assert line(apart, "EAGLE-3")[-1] == "0 of 4"


def test_claims_are_confirmed_or_contradicted_by_differences_on_the_same_prompts(write):
    results = [made_up(0), made_up(1)]
    text = write(*results)
    assert line(text, "EAGLE-3 > EAGLE, chain")[1:] == ["8 of 8 (8 clear)", "0 of 8 (0 clear)", "confirmed"]
    assert line(text, "best tree > chain")[1:] == ["32 of 32 (32 clear)", "0 of 32 (0 clear)", "confirmed"]
    # EAGLE-3 gains by LK and Medusa loses: two seeds, two subjects, each
    assert line(text, "LK > KL, chain, T = 1")[1:] == ["4 of 8 (4 clear)", "4 of 8 (4 clear)", "both ways"]
    turned = copy.deepcopy(results)
    for result in turned:
        for row in result["rows"]:
            row["source"] = {"EAGLE": "EAGLE-3", "EAGLE-3": "EAGLE"}.get(row["source"], row["source"])
    assert line(write(*turned), "EAGLE-3 > EAGLE, chain")[-1] == "contradicted"
    rows = results[0]["rows"]
    by_prompt = {"steps_by_prompt": "10 10 10 10", "tokens_by_prompt": "20 31 20 31"}
    other = by_prompt | {"tokens_by_prompt": "31 20 31 21"}
    middle, low, high = difference(rows[0] | other, rows[0] | by_prompt)
    assert low < 0 < middle < high
    assert {claim.words for claim in claims(Figures(results))} >= {"MLP speculator > Medusa, best tree"}


@pytest.mark.parametrize(
    ("total", "above", "clear", "below", "clear_below", "verdict"),
    [
        (8, 8, 8, 0, 0, "confirmed"),
        (8, 7, 3, 0, 0, "confirmed, not clear everywhere"),
        (8, 6, 3, 2, 0, "confirmed where it is clear"),
        (8, 6, 3, 2, 1, "both ways"),
        (8, 7, 0, 1, 0, "not clear"),
        (8, 0, 0, 0, 0, "equal"),
        (8, 0, 0, 8, 8, "contradicted"),
        (8, 1, 0, 7, 2, "contradicted where it is clear"),
        (8, 0, 0, 7, 2, "contradicted, not clear everywhere"),
        (0, 0, 0, 0, 0, "not measured"),
    ],
)
def test_a_verdict_follows_from_the_comparisons_that_are_clear(total, above, clear, below, clear_below, verdict):
    assert judge(total, above, clear, below, clear_below) == verdict


def test_what_is_missing_is_said(write):
    result = made_up(0, speed=False)
    result["rows"] = [row for row in result["rows"] if row["source"] != "EAGLE"]
    result["rows"][0]["other_outputs"] = 1
    result["facts"]["acceptance"]["eagle-3"]["plain_other_outputs"] = 2
    text = write(result)
    assert "Not measured in these runs" in text
    assert line(text, "EAGLE-3 > EAGLE, chain")[-1] == "not measured"
    assert line(text, "EAGLE-3")[-1] == "one seed"
    assert "**1 differs from** plain decoding" in text
    assert "alone and beside others differ in 2" in text


def test_a_seed_without_a_figure_leaves_the_others_and_is_named(write, tmp_path):
    result = made_up(1)
    result["rows"] = [row for row in result["rows"] if row["source"] != "EAGLE-3"]
    text = write(made_up(0), result)
    assert line(text, "EAGLE-3")[1] == "3.05 (2.99 to 3.11; seed 1 not measured)"
    assert line(text, "EAGLE-3")[-1] == "0 of 0"
    assert line(text, "EAGLE-3, chain")[2] == "450, 1.80x; seed 1 not measured"
    assert "EAGLE-3, chain; seed 1 not measured" in (tmp_path / "benchmarks.svg").read_text()
    claim = line(text, "EAGLE-3 > EAGLE, chain")
    assert claim[1].startswith("4 of 4")
    assert claim[-1].endswith("; 4 not measured")
    whole = line(write(made_up(0), made_up(1)), "EAGLE-3 > EAGLE, chain")
    assert whole[1].startswith("8 of 8")
    assert "not measured" not in whole[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result.update(name="heads"), "is of 'heads'"),
        (lambda result: result["facts"].pop("answers"), "no figures of the stage answers"),
        (lambda result: result.update(rows=[]), "no figures of the stage acceptance"),
        (lambda result: result["settings"].update(depth=4), "was made with depth 4"),
        (lambda result: result["settings"].update(seed=0), r"have the seeds \[0, 0\]"),
    ],
)
def test_results_that_do_not_belong_together_are_refused(write, change, message):
    second = made_up(1)
    change(second)
    with pytest.raises(ValueError, match=message):
        write(made_up(0), second)


def test_every_source_of_the_made_up_results_is_a_source():
    assert LENGTHS.keys() < {source.name for source in SOURCES}
