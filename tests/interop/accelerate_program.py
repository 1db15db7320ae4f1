"""A program of Hugging Face Accelerate on CPUs: ``accelerate launch --multi_gpu … accelerate_program.py kos``.

Rank 0 prints the losses of all ranks as JSON.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from kos.interop.autoload import register

register()  # torch calls it only if kos is installed
dist.init_process_group(sys.argv[1])  # before Accelerate, which chooses gloo
accelerate: Any = __import__("accelerate")
accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
losses = []
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
if accelerator.is_main_process:
    print(json.dumps([type(model).__name__, dist.get_backend(), losses]), flush=True)
if dist.get_backend() == "gloo":  # it sometimes hangs when its groups are destroyed: see ranks.py
    os._exit(0)
dist.destroy_process_group()
