"""How many requests fit before anything is bought: the arithmetic of the KV cache, by the layouts and blocks that run.

    >>> import pykv
    >>> plan = pykv.plan("llama-3.1-8b", gpu="L4", context=8000)
    >>> plan.kv_bytes_per_token, plan.num_blocks, plan.requests["p50"]
    (131072, 2707, 5)

No torch is imported on this path.
"""

from pykv.planner.comparison import GpuChoice, compare_gpus
from pykv.planner.plan import KvPlan, plan

__all__ = ["GpuChoice", "KvPlan", "compare_gpus", "plan"]
