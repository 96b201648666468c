"""One thread for torch: tiny models are slower on two, and much slower on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
