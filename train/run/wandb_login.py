"""Find out whether this machine is logged in to W&B, from the files of `wandb login`, without asking the user."""

import netrc
import os
from pathlib import Path
from urllib.parse import urlparse

# Hosts that `wandb login` writes into netrc: the second one since the cloud moved (wandb 0.31 reads either).
CLOUD_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def wandb_mode(environment=os.environ):
    """ "online" if this machine is logged in, else "offline". WANDB_MODE overrides that, unless W&B would then ask for a login."""
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
