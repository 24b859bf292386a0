"""The CUDA driver, as far as kernels that were compiled ahead of time need it: load, and launch. Needs no toolkit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, Union, byref, c_char, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass

from kimi_hal.errors import PluginError
from kimi_hal_nvidia import cubins

#: cuda.h: attributes of a kernel, and of a launch.
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER, CLUSTER_DIMENSION, OVERLAP = 8, 14, 4, 6


class _Dimensions(Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class _Value(Union):
    _fields_ = (("cluster", _Dimensions), ("flag", c_int), ("room", c_char * 64))


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", _Value))


class Launch(Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("attribute_count", c_uint),
    )


@functools.cache
def library() -> ctypes.PyDLL:
    """Return the driver's library. Its calls are short and keep the interpreter's lock.

    Raises:
        PluginError: there is none.
    """
    try:
        cuda = ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise PluginError(
            "nvidia", f"the CUDA driver cannot be loaded ({error}): install an NVIDIA driver"
        ) from error
    cuda.cuLaunchKernelEx.argtypes = (c_void_p,) * 4  # numbers, which cost less than objects
    return cuda


def say(code: int, what: str) -> str:
    """Return a sentence on a driver call that failed."""
    name = c_char_p()
    library().cuGetErrorName(c_int(code), byref(name))
    return f"{what} failed with {(name.value or b'an unknown error').decode()} ({code})"


def require(code: int, what: str) -> None:
    """Raise ``PluginError`` unless a driver call has succeeded."""
    if code:
        raise PluginError("nvidia", say(code, what))


@functools.cache
def _loaded(stem: str, arch: str) -> c_void_p:
    image, handle = cubins.read(stem, arch), c_void_p()
    code = library().cuLibraryLoadData(byref(handle), image, None, None, 0, None, None, 0)
    require(code, f"loading {cubins.file_name(stem, arch)} ({len(image)} bytes)")
    return handle


@dataclass(frozen=True)
class Kernel:
    """One kernel of a cubin, ready to be launched on a device.

    Args:
        name: of the kernel.
        handle: the driver's.
        threads: of a block.
        shared: bytes of shared memory of a block.
    """

    name: str
    handle: c_void_p
    threads: int
    shared: int


@functools.cache
def kernel(stem: str, arch: str, name: str, *, threads: int, shared: int, device: int) -> Kernel:
    """Load a kernel and let it have its shared memory on a device.

    Raises:
        PluginError: the driver refuses: an architecture without this code, a driver older than CUDA 12.
    """
    cuda, handle = library(), c_void_p()
    code = cuda.cuLibraryGetKernel(byref(handle), _loaded(stem, arch), name.encode())
    require(code, f"finding {name} in {cubins.file_name(stem, arch)}")
    for attribute, value in ((MAX_DYNAMIC_SHARED, shared), (NON_PORTABLE_CLUSTER, 1)):
        code = cuda.cuKernelSetAttribute(c_int(attribute), c_int(value), handle, c_int(device))
        require(code, f"setting attribute {attribute} of {name} to {value}")
    return Kernel(name, handle, threads, shared)


def launcher(
    what: Kernel, parameters: int, cluster: bool = False, overlap: bool = False
) -> Callable[..., None]:
    """Return ``launch(grid, stream, blocks=1)``, which launches a kernel with one structure as its argument.

    Args:
        what: the kernel.
        parameters: the address of the structure, which the driver copies during a call.
        cluster: the launch names the blocks of a cluster.
        overlap: it may begin before the kernel ahead of it has ended, for which it waits itself.
    """
    attributes = (_Attribute * 2)(_Attribute(id=OVERLAP), _Attribute(id=CLUSTER_DIMENSION))
    attributes[0].value.flag = 1
    attribute = attributes[1]
    attribute.value.cluster.x = attribute.value.cluster.y = attribute.value.cluster.z = 1
    config = Launch(
        grid=(1, 1, 1),
        block=(what.threads, 1, 1),
        shared=what.shared,
        attributes=ctypes.pointer(attributes[0 if overlap else 1]),
        attribute_count=int(cluster) + int(overlap),
    )
    arguments = (c_void_p * 1)(parameters)
    call, handle, grid, at = (
        library().cuLaunchKernelEx,
        what.handle.value,
        config.grid,
        ctypes.addressof(config),
    )
    given = ctypes.addressof(arguments)

    def launch(blocks_x: int, blocks_y: int, stream: int, blocks: int = 1) -> None:
        grid[0], grid[1] = blocks_x, blocks_y
        config.stream = stream
        if cluster:
            attribute.value.cluster.x = blocks
        code = call(at, handle, given, None)
        if code:
            raise PluginError("nvidia", say(code, f"launching {what.name} on {blocks_x} × {blocks_y} blocks"))

    launch.keeps = (arguments, attributes, config)  # type: ignore[attr-defined]
    return launch
