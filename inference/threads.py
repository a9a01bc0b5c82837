"""Number of CPU threads that the commands decode on."""

import os

import torch

# Up to this hidden size products are so small that waking a thread costs more than it saves; on a busy machine waiting threads cost
# ten times as much (docs/log.md).
MOST_HIDDEN = 512


def choose_threads(config, device):
    """Use one thread on a CPU for a model as small as the embedded one, torch's own number for others, and the user's if set.

    config: the target's Hugging Face config. Sets torch's number of threads for the whole process, so a command calls it and no
    library function does.
    """
    named = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)]
    if device.type == "cpu" and config.hidden_size <= MOST_HIDDEN and not named:
        torch.set_num_threads(1)
