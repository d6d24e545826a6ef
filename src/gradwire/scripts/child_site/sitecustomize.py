"""Loaded at the start of each Python process that a script under ``gradwire run`` starts.

Python imports ``sitecustomize`` from the first folder of PYTHONPATH that has one. This one waits until the
process imports torch's ``DistributedDataParallel``, and lets gradwire attach to the first that is made. It
needs nothing but the standard library, and must never keep a process from starting.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_next() -> None:
    """Load the ``sitecustomize`` that this one hides, if there is one."""
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _wait_for_models() -> None:
    path = os.path.join(os.path.dirname(_HERE), "imports.py")
    spec = importlib.util.spec_from_file_location("_gradwire_imports", path)
    assert spec is not None
    assert spec.loader is not None
    imports = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imports)

    def prepare(module):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        ddp = module.DistributedDataParallel
        make = ddp.__init__

        def attach_and_make(self, *args, **kwargs):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN003, ANN202
            ddp.__init__ = make
            # By now torch is imported; before, gradwire could not be.
            from gradwire.scripts import serve_as_child

            serve_as_child()
            ddp.__init__(self, *args, **kwargs)

        ddp.__init__ = attach_and_make

    imports.ImportNotice("torch.nn.parallel.distributed", prepare).watch()


try:
    _load_next()
finally:
    if os.environ.get("GRADWIRE_RUN"):
        _wait_for_models()
