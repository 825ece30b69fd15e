"""What holds for every test? One thread a process: tiny tensors gain nothing from more, and workers share the cores."""

import torch

torch.set_num_threads(1)
