"""Conversion of published heads of every family, by their Hub id, into every format that can hold them, and back to equal files."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export import verify
from headstart.hub_export.export import main

H, V = 32, 320
THEIRS = "the card of the head it was converted from"
NOT_OF_THE_HEAD = ("transformers_version",)  # a key of config.json that says who wrote it


def deep(kind, config, target, **changes):
    head = kind(config.for_target(target.config, **changes))
    head.take_embedding(target.get_input_embeddings().weight)
    return head


# format, another of the same family, the head
CONVERSIONS = {
    "medusa": ("vllm", lambda target: Medusa(MedusaConfig(H, V, 3, 2))),
    "medusa-shared": ("vllm", lambda target: Medusa(MedusaConfig(H, V, 2, 1, True))),
    "mlp-speculator": ("mlp-speculator", lambda target: MLPSpeculator(MLPSpeculatorConfig(H, V, 16, 3, False))),
    "eagle-vllm": ("eagle-sglang", lambda target: deep(Eagle, EagleConfig, target)),
    "eagle3": ("speculators", lambda target: deep(Eagle3, Eagle3Config, target, aux_layer_ids=(0, 1, 2))),
}


@pytest.fixture
def publish(hub_here):
    """publish(folder, id): its files become a repository of the Hub that this process asks."""

    def put(folder, repo_id):
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        hub_here.repositories[repo_id] = {"private": False, "files": files}

    return put


@pytest.mark.parametrize("format", CONVERSIONS)
def test_a_published_head_is_converted_by_its_id_and_back(tmp_path, tiny_target, publish, capsys, format):
    other, build = CONVERSIONS[format]
    torch.manual_seed(1)
    head = build(AutoModelForCausalLM.from_pretrained(tiny_target))
    for parameter in head.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    save_head(head, tmp_path / "published", format=format, dtype="bfloat16")
    publish(tmp_path / "published", "team/published")
    target = ["--base-model", str(tiny_target)]
    assert main(["team/published", "--format", other, "--output", str(tmp_path / "other"), *target]) == 0, (
        capsys.readouterr().err
    )
    publish(tmp_path / "other", "team/other")
    assert main(["team/other", "--format", format, "--output", str(tmp_path / "again"), *target]) == 0
    first, last = (load_head(tmp_path / name) for name in ("published", "again"))
    names = first.state_dict().keys()
    assert all(torch.equal(last.state_dict()[name], first.state_dict()[name]) for name in names)
    # speculators files also hold the target's embedding.
    assert last.state_dict().keys() - names <= {"embed_tokens.weight"}
    weights = next((tmp_path / "published").glob("*.safetensors")).name
    if last.state_dict().keys() == names:
        assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "published" / weights).read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("published", "again")]
    assert configs[1]["base_model_name_or_path"] == str(tiny_target)
    same = [{k: v for k, v in one.items() if k not in ("base_model_name_or_path", *NOT_OF_THE_HEAD)} for one in configs]
    assert same[0] == same[1]


def test_figures_of_a_published_export_come_along_by_its_id(tmp_path, publish):
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "run" / "head")
    measured = {"acceptance_length": 1.25, "per_position": [0.2, 0.05], "num_steps": 77}
    (tmp_path / "run" / "acceptance.json").write_text(json.dumps(measured))
    assert main([str(tmp_path / "run"), "--format", "medusa", "--output", str(tmp_path / "one")]) == 0
    publish(tmp_path / "one", "team/one")
    assert main(["team/one", "--format", "vllm", "--output", str(tmp_path / "two")]) == 0
    assert "| acceptance length | 1.25 |" in (tmp_path / "two" / "README.md").read_text()


@pytest.mark.parametrize(
    ("card", "options", "front", "said"),
    [
        (
            "license: apache-2.0",
            [],
            {"license": "apache-2.0"},
            f"under `apache-2.0`, as {THEIRS} says; its text is in `LICENSE`.",
        ),
        (
            "license: other\nlicense_name: llama3\nlicense_link: https://a.b/c",
            [],
            {"license": "other", "license_name": "llama3", "license_link": "https://a.b/c"},
            f"under `llama3`, as {THEIRS} says.",
        ),
        (
            "license: apache-2.0",
            ["--license", "mit"],
            {"license": "mit"},
            f"under `mit`, as whoever exported it says. {THEIRS.capitalize()} says `apache-2.0`.",
        ),
        ("license: Mine", [], {"license": "other", "license_name": "not-stated"}, f"and none was found in {THEIRS}."),
        (None, [], {"license": "other", "license_name": "not-stated"}, f"and none was found in {THEIRS}."),
    ],
)
def test_a_converted_head_names_its_origin_and_the_licence_of_that(tmp_path, publish, card, options, front, said):
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "published")
    if card is not None:
        (tmp_path / "published" / "README.md").write_text(f"---\n{card}\n---\n# It\n")
    publish(tmp_path / "published", "team/published")
    words = ["--format", "medusa", "--output"]
    assert main(["team/published@main", *words, str(tmp_path / "one"), *options]) == 0
    # The export of an export has the same origin, and the licence given to the first.
    assert main([str(tmp_path / "one"), *words, str(tmp_path / "two")]) == 0
    for name in ("one", "two"):
        told, text = (tmp_path / name / "README.md").read_text().removeprefix("---\n").split("\n---\n", 1)
        assert "Converted from [team/published](https://huggingface.co/team/published), revision `main`." in text
        assert {key: value for key, value in yaml.safe_load(told).items() if key.startswith("license")} == front
        assert (tmp_path / name / "LICENSE").is_file() == (front["license"] == "apache-2.0")
    assert said in (tmp_path / "one" / "README.md").read_text()


def test_a_folder_with_a_card_is_named_without_its_path(tmp_path):
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "secret" / "published")
    words = [str(tmp_path / "secret" / "published"), "--format", "medusa", "--output"]
    card = tmp_path / "secret" / "published" / "README.md"
    for text, name in (("# It\n\n---\nlicense: mit\n---\n", "one"), ("---\nlicense: mit\n---\n# It\n", "two")):
        card.write_text(text)
        assert main([*words, str(tmp_path / name)]) == 0
    one, two = ((tmp_path / name / "README.md").read_text() for name in ("one", "two"))
    assert "Converted from" not in one
    assert "license: other\nlicense_name: not-stated" in one
    assert " Converted from `published`." in two
    assert "\nlicense: mit\n" in two
    assert "secret" not in two + (tmp_path / "two" / "replay.json").read_text()


def test_an_export_of_ones_own_is_exported_again_not_converted(tmp_path, publish):
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "run" / "head")
    words = ["--format", "medusa", "--output"]
    assert main([str(tmp_path / "run"), *words, str(tmp_path / "one"), "--license", "apache-2.0"]) == 0
    publish(tmp_path / "one", "team/one")
    # From its folder, from the Hub, from an export of that, and from one whose replay.json was left out.
    for source, name in (("one", "two"), ("team/one@main", "three"), ("three", "four"), ("two", "five")):
        if name == "five":
            (tmp_path / "two" / "replay.json").unlink()
        source = source if "/" in source else str(tmp_path / source)
        assert main([source, *words, str(tmp_path / name)]) == 0
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("two", "three", "four", "five")}
    assert not any("onverted from" in card for card in cards.values())
    link = "[team/one](https://huggingface.co/team/one), revision `main`."
    for name, origin in (("two", "`one`."), ("three", link), ("four", link), ("five", "`two`.")):
        assert f"without them. Exported again from {origin}\n" in cards[name]
        assert "under `apache-2.0`, as the card of its earlier export says; its text" in cards[name]
        training = origin.split(",")[0].removesuffix(".")
        assert f"\nNo recipe was found; the card of its earlier export, {training}, may have it.\n" in cards[name]


def test_what_a_published_conversion_came_from_is_named_not_its_publisher(tmp_path, publish):
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "published")
    publish(tmp_path / "published", "team/published")
    words = ["--format", "medusa", "--output"]
    assert main(["team/published", *words, str(tmp_path / "one")]) == 0
    publish(tmp_path / "one", "me/one")
    assert main(["me/one", *words, str(tmp_path / "two")]) == 0
    text = (tmp_path / "two" / "README.md").read_text()
    assert "Converted from [team/published](https://huggingface.co/team/published)." in text


def test_an_export_is_verified_by_its_id(tmp_path, publish, capsys, monkeypatch):
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "source")
    assert main([str(tmp_path / "source"), "--format", "medusa", "--output", str(tmp_path / "one")]) == 0
    assert main(["verify", "team/nothing"]) == 2
    said = capsys.readouterr().err
    assert "there is no folder team/nothing, and the Hub at http" in said
    assert "(asked) gave no such repository: 404 Client Error" in said
    asked = []

    def fetch(repo_id, revision, local_files_only):
        asked.append((repo_id, revision))
        return str(tmp_path / "one")

    monkeypatch.setattr(verify, "snapshot_download", fetch)
    monkeypatch.setattr(verify, "in_clean_process", lambda request: {"error": request["folder"]})
    found = verify.verify("team/one")
    verify.verify("team/one@a/branch")
    assert asked == [("team/one", None), ("team/one", "a/branch")]
    assert [one.evidence for one in found if one.state == verify.FAILED] == [str(tmp_path / "one")]
