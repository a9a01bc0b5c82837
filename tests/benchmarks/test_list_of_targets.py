"""benchmarks/proofs/targets.py: models are told apart, and a model that would train silently wrong fails the script."""

import pytest

from headstart.benchmarks.proofs import targets
from headstart.inference.models.layer_reach import Reach
from headstart.train.teacher import features


def test_models_are_listed_by_what_can_be_trained_on_them(tmp_path):
    table = tmp_path / "targets.md"
    kinds = ["llama", "mistral", "gpt2", "bloom", "cohere", "hy_v4", "jamba"]
    assert targets.main(["--only", *kinds, "--table", str(table)]) == 0
    page = table.read_text()
    assert "| Every head | gpt2, llama, mistral |" in page
    assert "EAGLE-3, which cannot read their residual streams | hy_v4 |" in page
    assert "as EAGLE heads need | none |" in page
    assert "takes no position ids, or no attention mask | bloom |" in page
    assert "scaled, capped, or through further layers | cohere |" in page
    assert "carry a state from one document to the next, or do not follow the masks | jamba |" in page


@pytest.mark.parametrize(("checked", "status", "verdict"), [(True, 0, "refused"), (False, 1, "WRONG")])
def test_a_model_that_is_trained_wrong_fails_the_script(monkeypatch, capsys, checked, status, verdict):
    monkeypatch.setattr(features, "find_reaches", lambda config: {None: Reach()})  # no windows
    if not checked:
        monkeypatch.setattr(features.FrozenTarget, "check", lambda *rows: None)
    assert targets.main(["--only", "mistral"]) == status
    assert f'"verdict": "{verdict}"' in capsys.readouterr().out
