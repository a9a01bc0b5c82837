"""What a head was converted from, or exported again from: its name, and the licence that its card names.

Knows SOURCE alone: what was measured on it is hub_export/measurements.py's, what its target's card says target_files.py's.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError

from ..heads.storage.hub_answer import hub_options
from ..heads.storage.hub_id import split_revision
from .measurements import REPLAY_FILE
from .target_files import is_license_id, read_front_matter


@dataclass(frozen=True)
class Origin:
    """A head with a card of its own.

    name: a Hub id, or the name of a folder; license: what its card says, by its keys there; again: Headstart exported it, from a
    run or from something without a card
    """

    name: str
    revision: str | None
    on_hub: bool
    license: dict
    again: bool = False

    @property
    def record(self):
        """As replay.json keeps it, for an export of this export."""
        return {"name": self.name, "revision": self.revision, "on_hub": self.on_hub, "again": self.again}

    @property
    def link(self):
        """Its name for the card, which leads there where it is on the Hub."""
        return f"[{self.name}](https://huggingface.co/{self.name})" if self.on_hub else f"`{self.name}`"

    @property
    def text(self):
        """A sentence for the card."""
        done = "Exported again" if self.again else "Converted"
        return f"{done} from {self.link}{f', revision `{self.revision}`' if self.revision else ''}."

    @property
    def card(self):
        """What the card that names its licence is called."""
        return "the card of its earlier export" if self.again else "the card of the head it was converted from"

    @property
    def license_name(self):
        """The licence in words; None where the card names none."""
        return self.license.get("license_name") or self.license.get("license")


def find_origin(source, folder, earlier=None):
    """The Origin of a head; None where `source` is no Hub id, its folder has no card with a front matter, and `earlier` is None.

    source: as given; folder: what resolve_head made of it; earlier: `record` in the replay.json of `folder`, or None.
    """
    on_hub = not Path(source).is_dir()
    if on_hub:
        name, revision = split_revision(source)
        with contextlib.suppress(OSError, ValueError, HTTPError):  # a card that is not there, or not in the cache
            hf_hub_download(name, "README.md", revision=Path(folder).name, **hub_options(source))
    front = read_front_matter(folder)
    # What an export came from counts for an export of it, unless that is a folder on the machine of whoever published this one.
    if earlier and (earlier["on_hub"] or not on_hub):
        told = (earlier.get(key) for key in ("name", "revision", "on_hub"))
        return Origin(*told, _license_of(front), earlier.get("again", False))
    # Its card says whose export it is where replay.json was left out.
    ours = Path(folder, REPLAY_FILE).is_file() or front.get("library_name") == "headstart"
    again = earlier.get("again", False) if earlier else ours
    if on_hub:
        return Origin(name, revision, True, _license_of(front), again)
    return Origin(Path(folder).resolve().name, None, False, _license_of(front), again) if front else None


def _license_of(front):
    """The keys of a front matter that say the licence; {} where it names none, or something that is no id."""
    id, name, link = (front.get(key) for key in ("license", "license_name", "license_link"))
    if not isinstance(id, str) or not is_license_id(id) or (id, name) == ("other", "not-stated"):
        return {}
    if id != "other":
        return {"license": id}
    found = {"license": id, "license_name": name} if isinstance(name, str) else {"license": id}
    # A link into the repository leads nowhere from another one.
    return found | ({"license_link": link} if str(link).startswith("https://") else {})
