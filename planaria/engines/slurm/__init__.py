"""Groups as jobs of Slurm, or as the steps of one."""
