"""The kernels' tests run in processes of their own: Triton interprets or compiles as decided when it is imported.

`test_interpreted.py` and `test_compiled.py` start them; this process does not collect them.
"""

import os

collect_ignore = [] if os.environ.get("PYKV_KERNEL_TESTS") else ["running", "compiled"]
