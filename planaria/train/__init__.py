"""A thin trainer and a small reference Llama, in plain PyTorch over ``planaria.torch``."""
