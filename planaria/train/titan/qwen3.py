"""torchtitan's qwen3 configurations under Planaria: ``--module planaria.train.titan.qwen3 --config qwen3_0_6b``."""

from planaria.train.titan import configurations

globals().update(configurations("qwen3"))
