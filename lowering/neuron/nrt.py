"""Bindings to the C interface of the Neuron runtime, libnrt.

Source: nrt/nrt.h and nrt/nrt_status.h of the AWS Neuron SDK, version 2 of the interface.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_void_p

from lowering.errors import LoweringError

_LIBRARY = "libnrt.so.1"
_SEARCH_PATHS = (_LIBRARY, f"/opt/aws/neuron/lib/{_LIBRARY}")
_NO_FRAMEWORK, _ON_DEVICE = 1, 0
_DEFAULT_VNC_COUNT = -1  # nrt.h: "DEPRECATED: always use -1"

_STATUS_MESSAGES = {
    1: "general failure",
    2: "invalid: a bad NEFF, or a tensor with a name or size that the NEFF does not declare",
    3: "invalid handle",
    4: "a resource could not be allocated; the device's memory may be full",
    5: "timeout",
    6: "hardware error",
    7: "the execution queue is full",
    9: "not enough Neuron cores; another process may be using them",
    10: "this runtime does not support the version of the NEFF; update the runtime",
    13: "the runtime is not initialised",
    14: "the runtime is closed",
    1002: "invalid input",
    1003: "numerical errors: NaN was produced",
    1004: "execution errors",
    1005: "the Neuron core is in use by another process",
}
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "nrt_init": (c_int, [c_int, c_char_p, c_char_p]),
    "nrt_close": (None, []),
    "nrt_get_visible_vnc_count": (c_int, [POINTER(c_uint32)]),
    "nrt_load": (c_int, [c_char_p, c_size_t, c_int32, c_int32, POINTER(c_void_p)]),
    "nrt_load_collectives": (
        c_int,
        [c_char_p, c_size_t, c_int32, c_int32, c_uint32, c_uint32, POINTER(c_void_p)],
    ),
    "nrt_unload": (c_int, [c_void_p]),
    "nrt_tensor_allocate": (c_int, [c_int, c_int, c_size_t, c_char_p, POINTER(c_void_p)]),
    "nrt_tensor_free": (None, [POINTER(c_void_p)]),
    "nrt_tensor_read": (c_int, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "nrt_tensor_write": (c_int, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "nrt_allocate_tensor_set": (c_int, [POINTER(c_void_p)]),
    "nrt_destroy_tensor_set": (None, [POINTER(c_void_p)]),
    "nrt_add_tensor_to_tensor_set": (c_int, [c_void_p, c_char_p, c_void_p]),
    "nrt_execute": (c_int, [c_void_p, c_void_p, c_void_p]),
}


class Runtime:
    """The initialised libnrt; a process has at most one, until close()."""

    def __init__(self, library: str | None = None) -> None:
        """Load and initialise the library; `library` is its path, None for the usual places.

        Raises:
            LoweringError: libnrt is not installed, or finds no device.
        """
        self.library = _load(library)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self.call("nrt_init", _NO_FRAMEWORK, b"", b"")

    def cores(self) -> int:
        """Return the number of (logical) Neuron cores that this process may use."""
        count = c_uint32()
        self.call("nrt_get_visible_vnc_count", byref(count))
        return count.value

    def load(self, neff: bytes, *, core: int, rank: int, ranks: int) -> LoadedNeff:
        """Load a program onto a core; several ranks must all be loading at the same time."""
        handle = c_void_p()
        load_arguments = neff, len(neff), core, _DEFAULT_VNC_COUNT
        if ranks == 1:
            self.call("nrt_load", *load_arguments, byref(handle))
        else:
            self.call("nrt_load_collectives", *load_arguments, rank, ranks, byref(handle))
        return LoadedNeff(self, handle, core)

    def tensor(self, nbytes: int, *, core: int) -> RuntimeTensor:
        """Allocate memory on the device of a core."""
        handle = c_void_p()
        self.call("nrt_tensor_allocate", _ON_DEVICE, core, nbytes, None, byref(handle))
        return RuntimeTensor(self, handle, nbytes)

    def close(self) -> None:
        """Shut down the runtime."""
        self.library.nrt_close()

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library that returns a status.

        Raises:
            LoweringError: the status is not success.
        """
        status = getattr(self.library, name)(*arguments)
        if status:
            meaning = _STATUS_MESSAGES.get(status, "see nrt_status.h")
            raise LoweringError(f"{name} of the Neuron runtime returned {status}: {meaning}")


def _load(library: str | None) -> ctypes.CDLL:
    candidates = (library,) if library else (os.environ.get("GRAPHTRAIN_LIBNRT"), *_SEARCH_PATHS)
    errors = []
    for path in filter(None, candidates):
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            errors.append(str(error))
    raise LoweringError(
        f"the Neuron runtime was not found on this machine ({'; '.join(errors)}); on a trn "
        "instance, install aws-neuronx-runtime-lib, or set GRAPHTRAIN_LIBNRT to the library's path"
    )


class RuntimeTensor:
    """Memory on a device; freed when the object is garbage-collected."""

    def __init__(self, runtime: Runtime, handle: c_void_p, nbytes: int) -> None:
        self._runtime, self.handle, self.nbytes = runtime, handle, nbytes

    def write(self, data: bytes | memoryview) -> None:
        """Copy data from the host; it must have the tensor's size."""
        buffer = (ctypes.c_char * self.nbytes).from_buffer_copy(data)
        self._runtime.call("nrt_tensor_write", self.handle, buffer, 0, self.nbytes)

    def read(self) -> bytes:
        """Copy the tensor's content to the host."""
        buffer = ctypes.create_string_buffer(self.nbytes)
        self._runtime.call("nrt_tensor_read", self.handle, buffer, 0, self.nbytes)
        return buffer.raw

    def __del__(self) -> None:
        self._runtime.library.nrt_tensor_free(byref(self.handle))


class LoadedNeff:
    """A program loaded on one core."""

    def __init__(self, runtime: Runtime, handle: c_void_p, core: int) -> None:
        self._runtime, self._handle, self.core = runtime, handle, core

    def execute(self, inputs: dict[str, RuntimeTensor], outputs: dict[str, RuntimeTensor]) -> None:
        """Run the program once on tensors by name; return when the outputs are written."""
        tensor_sets = [self._set(inputs), self._set(outputs)]
        try:
            self._runtime.call("nrt_execute", self._handle, *tensor_sets)
        finally:
            for tensor_set in tensor_sets:
                self._runtime.library.nrt_destroy_tensor_set(byref(tensor_set))

    def unload(self) -> None:
        """Remove the program from its core."""
        self._runtime.call("nrt_unload", self._handle)

    def _set(self, tensors: dict[str, RuntimeTensor]) -> c_void_p:
        tensor_set = c_void_p()
        self._runtime.call("nrt_allocate_tensor_set", byref(tensor_set))
        for name, tensor in tensors.items():
            self._runtime.call(
                "nrt_add_tensor_to_tensor_set", tensor_set, name.encode(), tensor.handle
            )
        return tensor_set
