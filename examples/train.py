"""KernelBench's Model and its replacement learn the same. Runs on a CPU, in seconds.

Both start from the same weights and see the same batches: which channel is brightest?
"""

import sys

import torch
from torch import nn

from convt_reduce.kernelbench import Model, ModelNew

CLASSES, STEPS = 4, 40


def train(kind: type[nn.Module]) -> list[float]:
    torch.manual_seed(0)
    head = kind(CLASSES, CLASSES, 3, stride=2, padding=1, output_padding=1, multiplier=0.5)
    model = nn.Sequential(head, nn.Flatten())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (16,))
        images = torch.randn(16, CLASSES, 12, 12)
        images[torch.arange(16), labels] += 2
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


old, new = train(Model), train(ModelNew)
print("step     Model  ModelNew")
for step in (0, *range(9, STEPS, 10)):
    print(f"{step:4} {old[step]:9.5f} {new[step]:9.5f}")
if not torch.allclose(torch.tensor(old), torch.tensor(new), rtol=1e-3):
    sys.exit("the two do not learn the same")
