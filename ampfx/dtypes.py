"""Small facts about dtypes and the values that flow along the edges of a captured graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LOW_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def is_low(dtype: torch.dtype | None) -> bool:
    """Whether ``dtype`` is one of the low-precision floating types, float16 or bfloat16."""
    return dtype in LOW_DTYPES


def short_name(dtype: torch.dtype | None) -> str:
    """The name of a dtype in printed graphs: ``f32``, ``bf16``, ``i64``."""
    if dtype is None:
        return "-"
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def long_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its package: ``float32``, ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def default_low_dtype(device_type: str) -> torch.dtype:
    """The dtype that ``torch.autocast`` uses on a device when none is given."""
    return torch.get_autocast_dtype(device_type)


@dataclass(frozen=True)
class TensorSpec:
    """What is known about one tensor at one edge of the graph.

    ``storage`` is an id of the memory that the tensor lives in: two values with equal ids alias
    each other in the recorded run.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    device: torch.device
    storage: int

    @property
    def numel(self) -> int:
        """Number of elements in the recorded run."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements in its dtype."""
        return self.numel * self.dtype.itemsize

    def with_dtype(self, dtype: torch.dtype) -> TensorSpec:
        """The same tensor in another dtype."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True)
class Region:
    """Where in the program a node stands.

    Args:
        grad: whether gradients are recorded here.
        autocast: None outside any region of the author's; False where the author switched
            autocast off; True where the author switched it on.
        opaque: 0, or the id of a region whose inside must stay together (a checkpoint).
    """

    grad: bool = True
    autocast: bool | None = None
    opaque: int = 0
