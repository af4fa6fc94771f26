"""One rank of one group, without Planaria: trains a few steps in one layout after the other and tells what it saw.

python spread_rank.py CONFIG CASES.json OUT    with torchrun's variables set
CASES: [[degrees, tied, [--section.key value]], ...]
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from planaria.train.config import load
from tests.train.spreading import steps_of

config, cases, out = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
seen = []
for degrees, tied, words in json.loads(Path(cases).read_text()):
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    seen.append(steps_of(load(Path(config), words), mesh, tied))
Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(seen))
dist.destroy_process_group()
