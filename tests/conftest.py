"""What holds for every test? One thread a process, and Triton's interpreter where there is no GPU.

Tiny tensors gain nothing from more threads, and workers share the cores. The interpreter has to be asked for before
Triton is first imported.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
