"""Let code written for CUDA run, unmodified, on a machine without a GPU.

Megatron-Core allocates with ``device="cuda"`` and calls ``torch.cuda.current_device()``,
``torch.cuda.Stream()`` and friends throughout. The shim makes these land on the CPU without
touching a Megatron file, in two layers:

* a ``TorchFunctionMode`` that rewrites ``device=``, ``.cuda()``, ``.to("cuda")`` and pinned memory;
* stand-ins in ``torch.cuda`` for the calls that would raise without a driver
  (``cuda_stand_ins``).

Facts stay facts: ``torch.cuda.is_available()`` is still False, ``torch.cuda.device_count()`` still
0 and ``Tensor.is_cuda`` still False. The one exception is ``Tensor.type()``, which answers with the
CUDA name of the type ("torch.cuda.FloatTensor"), because Megatron's optimizers assert on that text.

There is one random stream, the CPU's: seeding or restoring the "CUDA" generator does nothing, so
the ``fork`` of Megatron's RNG tracker is a null context. Keep dropouts at 0 in tests of numbers.

A ``TorchFunctionMode`` belongs to the thread that entered it: tensors that another Python thread
makes with ``device="cuda"`` are not covered.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.ranks.cuda_stand_ins import cuda_stand_ins

_logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")
# Modules that hold `_lazy_call` by name. torch.cuda queues what it is given until CUDA starts,
# which never happens here: Megatron's RNG tracker would add to that queue at every dropout.
_LAZY_CALL_HOLDERS = ("torch.cuda", "torch.cuda.random", "megatron.core.tensor_parallel.random")


def install_cpu_shim() -> bool:
    """Make CUDA calls of this process land on the CPU, if there is no CUDA device.

    Idempotent. Call it before the code under test runs; Megatron may be imported already.

    Returns:
        True if the shim is installed when the call returns. False if a CUDA device is available:
        then nothing is changed, and a warning says so.
    """
    global _installed
    if _installed is not None:
        return True
    if torch.cuda.is_available():
        _logger.warning("CUDA is available: the CPU shim does nothing, tensors stay on the GPU")
        return False
    _installed = _Shim()
    return True


def uninstall_cpu_shim() -> None:
    """Undo `install_cpu_shim`. Does nothing if the shim is not installed.

    Raises:
        LossAggError: if a ``TorchFunctionMode`` entered after the shim is still active.
    """
    global _installed
    if _installed is not None:
        _installed.remove()
        _installed = None


def cpu_shim_installed() -> bool:
    """Return whether the shim is active in this process."""
    return _installed is not None


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    # A bare number names an accelerator, as in `device=torch.cuda.current_device()`.
    return isinstance(device, int) and not isinstance(device, bool)


def _cpu_type(dtype: Any) -> Any:
    """The CPU name of a type given as "torch.cuda.FloatTensor" or as that class."""
    if getattr(dtype, "__module__", None) == "torch.cuda":
        return f"torch.{dtype.__name__}"
    return dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype


def _same_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The first positional argument may be a device, a dtype or another tensor.
    args = (args[0], *(_CPU if _names_cuda(a) else a for a in args[1:2]), *args[2:])
    return func(*args, **kwargs)


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs.get("dtype"):
        name = func(*args, **kwargs)
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
    return func(args[0], *(_cpu_type(a) for a in args[1:]), **kwargs)


_SPECIAL = {
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.record_stream: _nothing,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
}


class _CudaLandsOnCpu(TorchFunctionMode):
    """Rewrite the device arguments of torch calls, and the few methods that need a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not kwargs:
            kwargs = {}
        else:
            if "device" in kwargs and _names_cuda(kwargs["device"]):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        special = _SPECIAL.get(func)
        return func(*args, **kwargs) if special is None else special(func, args, kwargs)


class _Shim:
    """The installed state: the mode, and what to put back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        stand_ins = cuda_stand_ins()
        for name, stand_in in stand_ins.items():
            self._replace(torch.cuda, name, stand_in)
        # Megatron calls these two through torch.cuda.random.
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
            self._replace(torch.cuda.random, name, stand_ins[name])
        for module_name in _LAZY_CALL_HOLDERS:
            if module_name in sys.modules:
                self._replace(sys.modules[module_name], "_lazy_call", lambda call, **kwargs: None)
        self._mode = _CudaLandsOnCpu()
        self._cover_backward(torch.autograd)
        self._cover_device_meshes()
        self._mode.__enter__()

    def _replace(self, module: Any, name: str, stand_in: Any) -> None:
        if hasattr(module, name):
            self._replaced.append((module, name, getattr(module, name)))
            setattr(module, name, stand_in)

    def _cover_backward(self, autograd: Any) -> None:
        # `loss.backward()` is itself a torch function, and a mode is off while it handles one:
        # without this the backward of an autograd.Function would not be covered.
        run_backward = autograd._engine_run_backward

        def run_with_mode(*args: Any, **kwargs: Any) -> Any:
            with self._mode:
                return run_backward(*args, **kwargs)

        self._replace(autograd, "_engine_run_backward", run_with_mode)

    def _cover_device_meshes(self) -> None:
        # Megatron's FSDP wrappers make meshes of "cuda" devices; that is no torch function.
        if not torch.distributed.is_available():
            return
        mesh = torch.distributed.DeviceMesh
        initialize, from_group = mesh.__init__, mesh.from_group

        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            initialize(self, "cpu" if _names_cuda(device_type) else device_type, *args, **kwargs)

        def make(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
            device_type = "cpu" if _names_cuda(device_type) else device_type
            return from_group(group, device_type, *args, **kwargs)

        self._replaced.append((mesh, "from_group", vars(mesh)["from_group"]))
        self._replaced.append((mesh, "__init__", initialize))
        setattr(mesh, "from_group", staticmethod(make))  # noqa: B010 - mypy refuses assignments
        setattr(mesh, "__init__", init)  # noqa: B010

    def remove(self) -> None:
        top = torch.overrides._get_current_function_mode()
        if top is not self._mode:
            raise LossAggError(
                f"uninstall_cpu_shim: expected the shim to be the innermost TorchFunctionMode of "
                f"this thread, but that is {top!r}. Leave the mode (or `with torch.device(...)` "
                f"block) entered after install_cpu_shim(), and call from the thread that installed."
            )
        self._mode.__exit__(None, None, None)
        for module, name, original in reversed(self._replaced):
            setattr(module, name, original)


_installed: _Shim | None = None
