"""How many threads the commands decode on, on a CPU."""

import os

import torch

# Up to this hidden size products are so small that waking a thread costs more than it saves, and a busy neighbour makes waiting
# ones cost tenfold (docs/log.md).
MOST_HIDDEN = 512


def choose_threads(config, device):
    """One thread for a model as small as the embedded one on a CPU; torch's own number for others, and the user's if one is set.

    config: the target's Hugging Face config. Sets torch's number of threads for the whole process, so a command calls it and no
    library function does.
    """
    named = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)]
    if device.type == "cpu" and config.hidden_size <= MOST_HIDDEN and not named:
        torch.set_num_threads(1)
