"""The Triton kernels of pykv: paged attention and cache moves on GPUs.

One kernel a file, its launcher on top. `operators` registers the launchers with torch, which is how the rest of pykv
and `torch.compile` call them. Importing this package needs torch and triton.
"""
