"""The sources of a run's head, for W&B: its target, its data, the head that it starts from. Each is described and linked, never
uploaded.

Only local knowledge is used: revision and licence of a target from the Hub are looked up in the Hub's cache, not online. None
stands for unknown.
"""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from ...heads.storage.hub_id import split_revision
from ..data.sources.data_sets import data_sets
from ..data.sources.records import BUILT_IN, is_pattern, split_of


@dataclass(frozen=True)
class Source:
    """A source that a run reads.  role: "target", "data" or "start"; uri: "" if there is none"""

    role: str
    kind: str  # W&B's type of artifact: model or dataset
    uri: str
    metadata: dict

    @property
    def name(self):
        """The artifact's name."""
        return artifact_name(self.role, self.metadata["name"])


def find_sources(recipe, model, rows):
    """(target, data) of a run, or (target, data, start).

    recipe: has target, data and start_from; model: the loaded target, frozen; rows: their fingerprint
    """
    revision = getattr(model.config, "_commit_hash", None)
    card = _card(recipe.target, revision)
    target = {
        "name": recipe.target,
        "revision": revision,
        "licence": _licence(card),
        "architecture": type(model).__name__,
        # Without an adapter trained with the head, so that another run on the same target gives the same description.
        "num_parameters": sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
    }
    name, _ = split_of(recipe.data)
    data = {"name": recipe.data, "rows": rows, "revision": None, "licence": None}
    place = Path(name).expanduser()
    if name in BUILT_IN or is_pattern(name) or len(data_sets(recipe.data)) > 1:
        uri = ""
    elif place.exists():
        uri, data["licence"] = place.resolve().as_uri(), _licence(place / "README.md")
    else:
        uri = f"https://huggingface.co/datasets/{name}"
    sources = (
        Source("target", "model", _hub_or_file(recipe.target, revision), target),
        Source("data", "dataset", uri, data),
    )
    return (*sources, _find_start(recipe.start_from)) if recipe.start_from else sources


def _find_start(start_from):
    """The head that a run starts from; of one from the Hub the commit that was read, and its licence.

    A resumed run does not read it again, so a folder may be gone: what is neither here nor in the Hub's cache is named, not linked.
    """
    start, uri, place = {"name": start_from, "revision": None, "licence": None}, "", Path(start_from).expanduser()
    if place.exists():
        uri, start["licence"] = place.resolve().as_uri(), _licence(place / "README.md")
    else:
        with contextlib.suppress(ValueError):  # no name of the Hub
            name, start["revision"] = split_revision(start_from)
            found = try_to_load_from_cache(name, "config.json", revision=start["revision"])
            if isinstance(found, str):
                start["revision"] = Path(found).parent.name
                uri, start["licence"] = _hub_or_file(name, start["revision"]), _licence(_card(name, start["revision"]))
    return Source("start", "model", uri, start)


def artifact_name(*words):
    """A name that W&B takes: at most 128 of letters, digits, - _ and ."""
    return "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "-", word).strip("-") for word in words)[-128:]


def _hub_or_file(name, revision):
    place = Path(name).expanduser()
    if place.exists():
        return place.resolve().as_uri()
    return f"https://huggingface.co/{name}" + (f"/tree/{revision}" if revision else "")


def _card(name, revision):
    """The README of a model, from its folder or the Hub's cache; None if there is none."""
    place = Path(name).expanduser()
    if place.exists():
        return place / "README.md"
    found = try_to_load_from_cache(name, "README.md", revision=revision)
    return Path(found) if isinstance(found, str) else None


def _licence(card):
    """The `license` in the front matter of a README."""
    if card is None or not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
