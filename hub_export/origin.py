"""What a head was converted from: the published head that its card names, and the licence that the card of that one names.

Knows SOURCE alone: what was measured on it is hub_export/measurements.py's, what its target's card says target_files.py's.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError

from ..heads.hub_answer import hub_options
from ..heads.hub_id import split_revision
from .target_files import is_license_id, read_front_matter


@dataclass(frozen=True)
class Origin:
    """A head with a card of its own.  name: a Hub id, or the name of a folder; license: what its card says, by its keys there"""

    name: str
    revision: str | None
    on_hub: bool
    license: dict

    @property
    def record(self):
        """As replay.json keeps it, for an export of this export."""
        return {"name": self.name, "revision": self.revision, "on_hub": self.on_hub}

    @property
    def text(self):
        """A sentence for the card."""
        name = f"[{self.name}](https://huggingface.co/{self.name})" if self.on_hub else f"`{self.name}`"
        return f"Converted from {name}{f', revision `{self.revision}`' if self.revision else ''}."

    @property
    def license_name(self):
        """The licence in words; None where the card names none."""
        return self.license.get("license_name") or self.license.get("license")


def find_origin(source, folder, earlier=None):
    """The Origin of a head; None where `source` is no Hub id and its folder has no card with a front matter.

    source: as given; folder: what resolve_head made of it; earlier: `record` in the replay.json of `folder`, or None.
    """
    if not Path(source).is_dir():
        name, revision = split_revision(source)
        with contextlib.suppress(OSError, ValueError, HTTPError):  # a card that is not there, or not in the cache
            hf_hub_download(name, "README.md", revision=Path(folder).name, **hub_options(source))
        return Origin(name, revision, True, _license_of(read_front_matter(folder)))
    front = read_front_matter(folder)
    if not front:
        return None
    told = earlier or {"name": Path(folder).resolve().name, "revision": None, "on_hub": False}
    return Origin(told["name"], told["revision"], told["on_hub"], _license_of(front))


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
