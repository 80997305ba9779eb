"""The whole-step compile that PyTorch had until 2.4, by its names, on the stages of wholestep."""

from wholestep.spmd.api import COMPILED_OBJECT_KEY, Compiled, compile
from wholestep.spmd.comm_tensor import CommTensor, _wait_comm
from wholestep.spmd.data_parallel import DataParallel
from wholestep.spmd.override import Override
from wholestep.spmd.transforms import GraphModuleTransformation

__all__ = [
    "COMPILED_OBJECT_KEY",
    "CommTensor",
    "Compiled",
    "DataParallel",
    "GraphModuleTransformation",
    "Override",
    "_wait_comm",
    "compile",
]
