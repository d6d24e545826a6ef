"""Set before anything imports Triton or asks the resolver."""

import os

# Triton's interpreter then runs the CUDA kernels on CPU.
os.environ["TRITON_INTERPRET"] = "1"
# A connection to a torch store asks for its peer's name; where the question gets lost, glibc waits 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
