"""The loop of plain_loop_planaria.py with its curves in TensorBoard: one group writes, and if it dies another one does.

planaria run --groups 3 examples/tracked_loop.py -- --board board        then: tensorboard --logdir board
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import planaria.torch as pt

parser = argparse.ArgumentParser()
parser.add_argument("--board", default="board", help="directory for TensorBoard, which all groups see")
parser.add_argument("--steps", type=int, default=128)
args = parser.parse_args()

job = pt.init(shards=4, seed=0)
x = torch.randn(4096, 16)
y = (x.sin().sum(dim=1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
data = pt.ShardedDataset(TensorDataset(x, y), batch_size=8)
# With W&B: wandb.init(project=..., id=os.environ.get("PLANARIA_JOB"), resume="allow"), by whoever writes first.
# With MLflow: mlflow.start_run(run_id=...), made before by mlflow runs create or the first time.
writer = None

for step in job.steps(args.steps):
    for inputs, labels in step.batches(data):
        loss = F.cross_entropy(model(inputs), labels)
        step.record(loss=loss)  # the mean over all shards of all groups, in step.metrics of each of them
        loss.backward()
    optimizer.step()
    if step.groups[:1] == (job.group,) and job.rank == 0:
        if writer is None:
            # A file for each writer: TensorBoard shows all of a directory as one curve, and the newest value of a step.
            writer = SummaryWriter(args.board, filename_suffix=f".group{job.group}.{os.getpid()}")
        writer.add_scalar("loss", step.metrics["loss"], step.index)
        writer.flush()  # a group that is killed has written what it committed

if writer is not None:
    writer.close()
