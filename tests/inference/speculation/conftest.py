"""A small target with its plain outputs, and draft trees on disk."""

import json

import pytest

from headstart.inference.llm import LLM
from headstart.inference.speculation.tree import build_static_tree, save_tree
from headstart.tests.inference.speculation.small_drafters import (
    DEPTH,
    DEVICES,
    TEMPERATURES,
    llama,
    outputs,
)


@pytest.fixture(scope="module")
def tree_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    save_tree(build_static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.5, 0.2], [0.4]], 16), folder / "static.json")
    (folder / "dynamic.json").write_text(json.dumps({"dynamic": dict(max_depth=DEPTH, width=3, num_nodes=14)}))
    return {"chain": "chain"} | {name: str(folder / f"{name}.json") for name in ("static", "dynamic")}


@pytest.fixture(scope="module", params=DEVICES)
def setting(request):
    """(target, {temperature: plain outputs}) on a device."""
    target = llama().to(request.param)
    plain = LLM(target, max_num_seqs=1)
    return target, {t: outputs(plain, t, logprobs=2) for t in TEMPERATURES}
