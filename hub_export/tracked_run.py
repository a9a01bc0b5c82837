"""The W&B run that a head came from: named in the model card's metadata, and told the address of the head that was pushed.

A run folder's wandb.json says where its run is logged (train/run/tracking.py). Nothing here ends an export or a push: what W&B does
not take becomes a note.
"""

import json
import os
from pathlib import Path

import yaml

TRACKED_FILE = "wandb.json"  # of a run folder: {"run": address or, offline, id; "offline": true, "artifact": full name}


def find_tracked_run(run, is_final):
    """What wandb.json of a run folder says; None where there is none.  is_final: of a checkpoint the head's artifact is not told.

    Raises ValueError naming the file if it is broken.
    """
    path = Path(run, TRACKED_FILE)
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: told[key] for key in ("run", "offline", "artifact") if key in told and (is_final or key != "artifact")
        }
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): mend it or move it away") from None


def with_tracked_run(card, tracked):
    """A model card with `tracked` under "wandb" in its front matter; None leaves it as it is."""
    if tracked is None:
        return card
    front, rest = card.split("\n---\n", 1)
    return f"{front}\n{yaml.safe_dump({'wandb': tracked}, sort_keys=False)}---\n{rest}"


def tell_tracked_run(folder, address):
    """Write the Hub's address into the metadata and the description of the artifact that an export's card names."""
    tracked = read_tracked_run(Path(folder, "README.md"))
    if tracked.get("offline"):
        print(f"note: the run {tracked['run']} was logged to W&B offline, so its artifact does not know the address")
    elif artifact := tracked.get("artifact"):
        try:
            _tell(artifact, address)
            print(f"the W&B artifact {artifact} names the address")
        except Exception as error:  # W&B raises whatever it likes, and the push is done
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"note: the W&B artifact {artifact} does not know the address ({said})")


def read_tracked_run(card):
    """What the front matter of a README says under "wandb"; {} for nothing, or a card that is written otherwise."""
    text = card.read_text(encoding="utf-8")
    try:
        front = yaml.safe_load(text.split("\n---", 1)[0].removeprefix("---")) if text.startswith("---") else None
    except yaml.YAMLError:
        return {}
    tracked = front.get("wandb") if isinstance(front, dict) else None
    return tracked if isinstance(tracked, dict) else {}


def _tell(name, address):
    """name: "entity/project/name:alias"."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    # Verified with the first request; without a prompt, which would wait for somebody.
    if not wandb.login(prompt=False, verify=False):
        raise ValueError("W&B is not logged in here, or WANDB_MODE is offline")
    artifact = wandb.Api().artifact(name)
    artifact.metadata = artifact.metadata | {"hub": address}
    line = f"On the Hugging Face Hub: {address}"
    if line not in (artifact.description or ""):
        artifact.description = "\n".join(filter(None, (artifact.description, line)))
    artifact.save()
