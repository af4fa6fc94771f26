"""An ordinary PyTorch training loop. plain_loop_planaria.py is the same loop with Planaria."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(4096, 16)
y = (x.sin().sum(dim=1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

for inputs, labels in data:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()

print(f"right: {(model(x).argmax(dim=1) == y).float().mean():.1%}")
