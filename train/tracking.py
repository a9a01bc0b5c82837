"""Where a run's figures go: always metrics.jsonl, and W&B through accelerate if the recipe asks for it.

metrics.jsonl holds one JSON object per line, of kind "train" or "acceptance". W&B holds the recipe, every curve, a bar chart of
the acceptance per position and a table of sample generations. It is online if this machine is logged in (WANDB_API_KEY or a
netrc entry) and WANDB_MODE does not say otherwise; else offline, inside the run folder. It never asks, and a run never ends
because of it: whatever is missing becomes a note.
"""

import importlib.util
import json
import netrc
import os
import time
from pathlib import Path
from urllib.parse import urlparse

TRACKERS = ("wandb", "none")
START_TIMEOUT = 60  # seconds for W&B to answer, before the run goes on without it

# What `wandb login` writes into netrc: the second since the cloud moved (wandb 0.31 reads either).
CLOUD_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


class MetricsFile:
    """metrics.jsonl of a run folder. On other ranks than the main one it writes nothing (`path` None)."""

    def __init__(self, path):
        self.path = path

    def truncate_after(self, step):
        """Keep the lines up to `step`, for a run that goes on from there; a line cut short by a crash goes too."""
        if self.path is None or not self.path.exists():
            return
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        aside = self.path.with_suffix(".partial")
        aside.write_text("".join(kept), encoding="utf-8")
        aside.replace(self.path)

    def lines(self):
        """The whole lines as dicts."""
        if self.path is None or not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def has(self, kind, step):
        """Is there a line of this kind for this step?"""
        return any(line["kind"] == kind and line["step"] == step for line in self.lines())

    def write(self, line):
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class Speedometer:
    """Tokens per second since the last reading."""

    def __init__(self, tokens):
        self.start(tokens)

    def start(self, tokens):
        self.tokens, self.clock = tokens, time.perf_counter()

    def read(self, tokens):
        """The speed up to now, `tokens` being the count by now; starts the next interval."""
        before, clock = self.tokens, self.clock
        self.start(tokens)
        return (tokens - before) / (self.clock - clock)


def write_json(path, content):
    """Written aside, then renamed."""
    aside = Path(f"{path}.partial")
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def has_wandb():
    return importlib.util.find_spec("wandb") is not None


def wandb_mode(environment=os.environ):
    """ "online" where this machine is logged in, else "offline"; WANDB_MODE wins unless it would have to ask for a login."""
    wanted = environment.get("WANDB_MODE", "online").lower()
    if wanted in ("offline", "dryrun", "disabled"):
        return "disabled" if wanted == "disabled" else "offline"
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    own_server = environment.get("WANDB_BASE_URL")
    hosts = (urlparse(own_server).hostname,) if own_server else CLOUD_HOSTS
    path = Path(environment.get("NETRC") or "~/.netrc").expanduser()
    try:
        logins = netrc.netrc(path)
        return "online" if any(logins.authenticators(host) for host in hosts) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class WandbTracker:
    """A W&B run driven through accelerate, or nothing at all (`active` False).

    accelerator: made with log_with="wandb", None for no W&B; folder: the run's; recipe: dict of its values; note(text): tells
    the user.
    """

    def __init__(self, accelerator, folder, recipe, note):
        self.accelerator, self.active = accelerator, False
        self.environment = {}
        mode = wandb_mode()
        if accelerator is None or mode == "disabled":
            return
        try:
            import wandb
        except ImportError as error:
            note(f"W&B cannot be imported ({error}): figures go to metrics.jsonl only")
            return
        for attempt in dict.fromkeys((mode, "offline")):
            if self._start(wandb, attempt, folder, recipe, note):
                return

    def _start(self, wandb, mode, folder, recipe, note):
        own = {"WANDB_SILENT": "true"}
        if mode == "offline":
            # Nothing is written outside the run folder; WANDB_MODE also keeps the library from asking for a login.
            own |= {
                f"WANDB_{name}_DIR": str(Path(folder, "wandb", name.lower())) for name in ("CACHE", "CONFIG", "DATA")
            }
            own["WANDB_MODE"] = "offline"
        for name, value in own.items():
            self.environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        Path(folder, "wandb").mkdir(exist_ok=True)
        settings = wandb.Settings(init_timeout=START_TIMEOUT, console="off")
        options = {"name": Path(folder).name, "group": Path(folder).name, "dir": str(folder), "mode": mode}
        try:
            self.accelerator.init_trackers("headstart", recipe, {"wandb": options | {"settings": settings}})
        except (wandb.errors.Error, OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            note(f"W&B does not start {mode} ({reason})")
            self.accelerator.trackers.clear()  # it keeps the one that failed and would start it again
            return False
        self.active = True
        where = f"offline, in {folder}/wandb; `wandb sync` uploads it" if mode == "offline" else "online"
        note(f"W&B: {where}")
        return True

    def log(self, line):
        """A line of metrics.jsonl as curves."""
        if self.active:
            curves = {
                f"{line['kind']}/{name}": value
                for name, value in line.items()
                if isinstance(value, int | float) and name != "step"
            }
            for i, rate in enumerate(line.get("per_position", [])):
                curves[f"{line['kind']}/position{i}"] = rate
            self.accelerator.log(curves, step=line["step"])

    def log_acceptance(self, step, per_position, samples):
        """The acceptance plot and the sample generations."""
        if self.active:
            import wandb

            table = wandb.Table(
                columns=["position", "accepted"], data=[[i, rate] for i, rate in enumerate(per_position)]
            )
            plot = wandb.plot.bar(table, "position", "accepted", title=f"accepted per step, after step {step}")
            rows = [[step, sample["prompt"], sample["output"]] for sample in samples]
            generations = wandb.Table(columns=["step", "prompt", "output"], data=rows)
            self.accelerator.log({"acceptance/per_position": plot, "samples": generations}, step=step)

    def close(self):
        """Finish the W&B run and restore the environment."""
        if self.active:
            import wandb

            for tracker in self.accelerator.trackers:
                tracker.finish()
            # finish returns before the background process has written the end of its file; teardown waits for it to leave.
            wandb.teardown()
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.environment, self.active = {}, False
