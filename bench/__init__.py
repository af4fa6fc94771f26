"""Side-by-side benchmarks: Planaria, torch DDP and torchft under the same workload in the same session."""
