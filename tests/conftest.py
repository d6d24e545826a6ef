"""Set before anything imports Triton, whose interpreter then runs the CUDA kernels on CPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"
