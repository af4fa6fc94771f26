"""An ordinary PyTorch training loop, before Planaria; plain_loop_planaria.py is the same loop after it."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(4096, 16)
train_set = TensorDataset(x, (x.sin().sum(dim=1) > 0).long())

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(train_set, batch_size=32, shuffle=True)

for step, (inputs, labels) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
