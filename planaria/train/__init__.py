"""A thin trainer and a small reference Llama, in plain PyTorch over ``planaria.torch``; and what makes torchtitan's
trainer train under Planaria (``titan``)."""
