"""torchtitan's llama3 configurations under Planaria: ``--module planaria.train.titan.llama3 --config llama3_8b``."""

from planaria.train.titan import configurations

globals().update(configurations("llama3"))
