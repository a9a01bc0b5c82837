"""benchmarks/training/heads.py on the embedded target: every draft is measured, and the better tree marked."""

import json

from headstart.benchmarks.training import heads


def test_every_draft_of_a_head_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(heads, "FOR_RATES", 2)
    given = [
        "--head",
        f"ours={heads.ROOT / 'assets' / 'stdlib-coder-medusa'}",
        "--output",
        str(tmp_path / "found.json"),
    ]
    how = ["--temperature", "0", "--requests", "2", "--max-tokens", "6", "--chain", "2", "--nodes", "6"]
    assert heads.main(given + how) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["draft"], row["best_tree"]) for row in rows] == [("chain of 2", False), ("static tree of 6", True)]
    said = capsys.readouterr().out
    for row in rows:
        assert 1 <= row["low"] <= row["acceptance_length"] <= row["high"] <= 6
        assert f"{row['acceptance_length']:.3f} tokens per step" in said
