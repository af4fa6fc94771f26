"""Train a tiny language model on Python's own source code. Kill any part of it at any time: same bits.

planaria run --groups 4 --shards 8 examples/tiny_lm.py    four groups; one that dies is started again
python examples/tiny_lm.py                                alone: one group, the same weights at the end
"""

import argparse

import torch
import torch.nn.functional as F

import planaria.torch as pt
from planaria.demo.tiny_llama import Text, TinyLlama


def main() -> None:
    parser = argparse.ArgumentParser(description="train a byte-level Llama")
    parser.add_argument("--data", metavar="GLOB", help="text files to train on (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in each of the shards of a step")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    job = pt.init(shards=8, seed=args.seed)
    model = TinyLlama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = pt.ShardedDataset(Text(args.data, args.length), batch_size=args.batch_size)

    for step in job.steps(args.steps):
        for x, y in step.batches(data):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            step.record(loss=loss)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step.index % 10 == 0:
            print(f"step {step.index}: loss {step.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
