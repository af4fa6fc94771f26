"""The data plane: communicators and their lives, the gradient exchange and the healing transfer, over flat
buffers.
"""
