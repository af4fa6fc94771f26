"""Groups that train on their own and exchange what they have learnt now and then: for slow links that break.

planaria run --groups 4 examples/diloco.py                        DiLoCo: an exchange every 40 inner steps
planaria run --groups 4 examples/diloco.py --method streaming     half of the model every 20, while training goes on
planaria run --groups 4 examples/diloco.py --exact                kill any group at any time: same bits
planaria run --groups 4 --replay planaria_logs/JOB examples/diloco.py    JOB again, with the same groups missing
"""

import argparse

import torch
import torch.nn.functional as F

import planaria.torch as pt
from planaria.demo.tiny_llama import Text, TinyLlama


def main() -> None:
    parser = argparse.ArgumentParser(description="train a byte-level Llama with little communication")
    parser.add_argument("--method", choices=["local_sgd", "diloco", "streaming"], default="diloco")
    parser.add_argument("--data", metavar="GLOB", help="text files to train on (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=800, help="inner steps of every group")
    parser.add_argument("--every", type=int, default=40, help="inner steps between two exchanges of a parameter")
    parser.add_argument("--exact", action="store_true", help="the others compute what a lost group had to")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in an inner step of a group")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    job = pt.init(seed=0)
    model = TinyLlama()
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, args.lr, total_steps=args.steps + 1)
    if args.method == "local_sgd":
        sync = pt.LocalSGD(model, inner, every=args.every, exact=args.exact)
    elif args.method == "diloco":
        sync = pt.DiLoCo(model, inner, every=args.every, exact=args.exact)
    else:
        sync = pt.StreamingDiLoCo(model, inner, every=args.every, fragments=2, delay=2)
    job.protect(sync=sync, scheduler=scheduler)
    data = pt.ShardedDataset(Text(args.data, args.length), batch_size=args.batch_size)

    for step in job.steps(args.steps // sync.steps):  # a step is a round: every / fragments inner steps
        for x, y in step.batches(data):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            inner.zero_grad()
            scheduler.step()
            step.record(loss=loss)
        # Exchanged: the model has what the method makes of all groups' changes.
        print(f"round {step.index} of groups {step.groups}: loss {step.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
