"""As much of torch as vLLM's kernel wrappers touch: tensors that are a shape and nothing more.

A wrapper computes a grid and launch parameters from shapes, strides and types; no number in a
tensor matters to it. So the audit needs no torch (hundreds of megabytes, and another version to
pin): a tensor here has a type, a shape, strides and an address, and Triton's own launcher reads
exactly these of it. What is not here raises AttributeError, so that nothing is made up.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class dtype:
    """An element type; ``str()`` is torch's, which Triton parses."""

    name: str
    itemsize: int
    is_floating_point: bool = True
    is_signed: bool = True

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__


float16, bfloat16 = dtype("float16", 2), dtype("bfloat16", 2)
float32, float64 = dtype("float32", 4), dtype("float64", 8)
float8_e4m3fn, float8_e5m2 = dtype("float8_e4m3fn", 1), dtype("float8_e5m2", 1)
bool_ = dtype("bool", 1, False, False)
uint8, int8 = dtype("uint8", 1, False, False), dtype("int8", 1, False)
int16, int32, int64 = (dtype(f"int{8 * n}", n, False) for n in (2, 4, 8))
uint64, uint32 = dtype("uint64", 8, False, False), dtype("uint32", 4, False, False)

# IEEE 754 and OCP 8-bit floating point: largest finite value.
_LARGEST = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
}


class device:
    """The one device there is."""

    def __init__(self, name: str = "cuda:0") -> None:
        self.name = name
        self.type = name.partition(":")[0]
        self.index = 0

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return str(other) in (self.name, self.type)

    def __hash__(self) -> int:
        return hash(self.type)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _flat(sizes: Sequence[Any]) -> tuple[int, ...]:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        return tuple(sizes[0])
    return tuple(sizes)


class Tensor:
    """A shape on a device that is not there."""

    is_cuda = True
    requires_grad = False

    def __init__(
        self,
        shape: Sequence[int],
        dtype: dtype,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._strides = tuple(strides) if strides is not None else _contiguous(shape)
        self._offset = offset
        self.device = device("cuda:0")

    def __repr__(self) -> str:
        return f"Tensor({self.shape}, {self._strides}, {self.dtype})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    dim = property(lambda self: lambda: len(self.shape))

    def data_ptr(self) -> int:
        # The caching allocator aligns to 512 bytes; a view starts inside.
        return 0x7F0000000000 + self._offset * self.dtype.itemsize

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def storage_offset(self) -> int:
        return self._offset

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return all(
            have == want or size == 1
            for have, want, size in zip(
                self._strides, _contiguous(self.shape), self.shape, strict=True
            )
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        raise TypeError("a wrapper asks for a number in a tensor; the audit has none")

    def __getitem__(self, index: Any) -> Tensor:
        items = list(index) if isinstance(index, tuple) else [index]
        shape, strides, offset = [], [], self._offset
        if Ellipsis in items:
            at = items.index(Ellipsis)
            real = sum(item is not None for item in items) - 1
            items[at : at + 1] = [slice(None)] * (self.ndim - real)
        axis = 0
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            if isinstance(item, Tensor):
                return Tensor((*item.shape, *self.shape[1:]), self.dtype)
            size, step = self.shape[axis], self._strides[axis]
            if isinstance(item, slice):
                start, stop, by = item.indices(size)
                shape.append(len(range(start, stop, by)))
                strides.append(step * by)
                offset += start * step
            else:
                offset += (item % max(size, 1)) * step
            axis += 1
        shape += self.shape[axis:]
        strides += self._strides[axis:]
        return Tensor(shape, self.dtype, strides, offset)

    def __setitem__(self, index: Any, value: Any) -> None:
        self[index]

    def _like(self, shape: Sequence[int] | None = None, kind: dtype | None = None) -> Tensor:
        return Tensor(self.shape if shape is None else shape, kind or self.dtype)

    # Numbers do not matter: an operation has the shape of its larger operand.
    def _arithmetic(self, other: Any = None, *_: Any, **__: Any) -> Tensor:
        if isinstance(other, Tensor):
            shape = other.shape if other.numel() > self.numel() else self.shape
            kind = max(self.dtype, other.dtype, key=lambda d: (d.is_floating_point, d.itemsize))
            return self._like(shape, kind)
        return self._like()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __neg__ = _arithmetic
    add_ = sub_ = mul_ = div_ = exp = sigmoid = clamp = clamp_ = _arithmetic

    def _comparison(self, other: Any = None) -> Tensor:
        return self._like(kind=bool_)

    __lt__ = __le__ = __gt__ = __ge__ = __invert__ = __and__ = __or__ = _comparison

    def _itself(self, *_: Any, **__: Any) -> Tensor:
        return self

    contiguous = detach = clone = fill_ = zero_ = copy_ = cuda = _itself
    cpu = pin_memory = record_stream = _itself

    def to(self, *args: Any, dtype: Any = None, **_: Any) -> Tensor:
        kinds = [arg for arg in (*args, dtype) if type(arg) is type(self.dtype)]
        return Tensor(self.shape, kinds[0], self._strides) if kinds else self

    def float(self) -> Tensor:
        return self._like(kind=float32)

    def int(self) -> Tensor:
        return self._like(kind=int32)

    def long(self) -> Tensor:
        return self._like(kind=int64)

    def view(self, *sizes: Any) -> Tensor:
        if len(sizes) == 1 and isinstance(sizes[0], dtype):
            ratio = self.dtype.itemsize / sizes[0].itemsize
            return self._like((*self.shape[:-1], int(self.shape[-1] * ratio)), sizes[0])
        shape = list(_flat(sizes))
        if -1 in shape:
            known = math.prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = self.numel() // max(known, 1)
        return Tensor(shape, self.dtype, offset=self._offset)

    reshape = view

    def flatten(self, start: Any = 0, end: Any = -1) -> Tensor:
        last = end % self.ndim
        merged = math.prod(self.shape[start : last + 1])
        return self._like((*self.shape[:start], merged, *self.shape[last + 1 :]))

    def transpose(self, one: Any, two: Any) -> Tensor:
        order = list(range(self.ndim))
        order[one], order[two] = order[two], order[one]
        return self.permute(*order)

    def permute(self, *order: Any) -> Tensor:
        axes = _flat(order)
        return Tensor(
            [self.shape[a] for a in axes],
            self.dtype,
            [self._strides[a] for a in axes],
            self._offset,
        )

    def t(self) -> Tensor:
        return self.transpose(0, 1)

    def expand(self, *sizes: Any) -> Tensor:
        wanted = _flat(sizes)
        shape, strides = [], []
        lead = len(wanted) - self.ndim
        for axis, size in enumerate(wanted):
            own = self.shape[axis - lead] if axis >= lead else 1
            if size in (-1, own):
                shape.append(own)
                strides.append(self._strides[axis - lead])
            else:
                shape.append(size)
                strides.append(0)
        return Tensor(shape, self.dtype, strides, self._offset)

    def argmax(self, dim: Any = -1, keepdim: bool = False) -> Tensor:
        shape = list(self.shape)
        shape[dim : len(shape) if dim == -1 else dim + 1] = [1] if keepdim else []
        return Tensor(shape, int64)

    def gather(self, dim: Any = 0, index: Any = None) -> Tensor:
        return self._like(index.shape)

    def unsqueeze(self, axis: Any) -> Tensor:
        at = axis if axis >= 0 else axis + self.ndim + 1
        index: list[Any] = [slice(None)] * self.ndim
        index.insert(at, None)
        return self[tuple(index)]

    def squeeze(self, axis: Any = None) -> Tensor:
        keep = [
            i
            for i, size in enumerate(self.shape)
            if not (size == 1 and axis in (None, i, i - self.ndim))
        ]
        return Tensor(
            [self.shape[i] for i in keep],
            self.dtype,
            [self._strides[i] for i in keep],
            self._offset,
        )

    def split(self, size: Any, dim: Any = 0) -> list[Tensor]:
        axis = dim % self.ndim
        index: list[Any] = [slice(None)] * self.ndim
        parts = []
        for start in range(0, self.shape[axis], size):
            index[axis] = slice(start, start + size)
            parts.append(self[tuple(index)])
        return parts

    def chunk(self, count: Any, dim: Any = 0) -> list[Tensor]:
        return self.split(-(-self.shape[dim] // count), dim)

    def new_empty(self, *sizes: Any, dtype: Any = None, **_: Any) -> Tensor:
        return Tensor(_flat(sizes), dtype or self.dtype)

    new_zeros = new_ones = new_empty

    def new_tensor(self, data: Any, **_: Any) -> Tensor:
        return Tensor((len(data),), self.dtype)

    def untyped_storage(self) -> Tensor:
        return self


def empty(*sizes: Any, dtype: Any = None, **_: Any) -> Tensor:
    """A tensor; what was in it never mattered."""
    return Tensor(_flat(sizes), dtype or float32)


def full(size: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Tensor:
    return Tensor(_flat((size,)), dtype or float32)


def empty_like(other: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return Tensor(other.shape, dtype or other.dtype)


def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return Tensor(size, dtype or float32, stride)


def arange(*limits: Any, dtype: Any = None, **_: Any) -> Tensor:
    return Tensor((len(range(*map(int, limits))),), dtype or int64)


def tensor(data: Any, dtype: Any = None, **_: Any) -> Tensor:
    shape = []
    while isinstance(data, list | tuple):
        shape.append(len(data))
        data = data[0] if data else 0
    kind = float32 if isinstance(data, float) else int64
    return Tensor(shape, dtype or kind)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return Tensor(shape, tensors[0].dtype)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return Tensor(shape, tensors[0].dtype)


def bernoulli(probabilities: Tensor, **_: Any) -> Tensor:
    return probabilities._like()


class finfo:
    """Range of a floating point type."""

    def __init__(self, kind: dtype) -> None:
        self.max = _LARGEST[kind.name]
        self.min = -self.max
        self.dtype = kind.name


class iinfo:
    """Range of an integer type."""

    def __init__(self, kind: dtype) -> None:
        bits = 8 * kind.itemsize
        self.max = 2 ** (bits - kind.is_signed) - 1
        self.min = -(2 ** (bits - 1)) if kind.is_signed else 0


class _Context:
    """``torch.no_grad``, ``torch.device`` as a context, and the like: nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def install(capability: tuple[int, int], missing: Callable[[str], Any]) -> types.ModuleType:
    """Put the stand-in into ``sys.modules`` as ``torch``.

    Args:
        capability: What ``torch.cuda.get_device_capability`` answers.
        missing: Makes the value of an attribute that no wrapper needs but an import names
            (``torch.nn.Module`` as a base class, decorators, annotations).
    """
    torch = types.ModuleType("torch")
    own = {name: value for name, value in globals().items() if not name.startswith("_")}
    torch.__dict__.update(own)
    torch.__path__ = []
    torch.__dict__.update(
        bool=bool_, half=float16, float=float32, int=int32, long=int64, zeros=empty, ones=empty,
        empty_like=empty_like, zeros_like=empty_like, ones_like=empty_like, rand=empty,
        no_grad=_Context, inference_mode=_Context, __version__="0.0",
        **{"as_tensor": tensor, "Size": tuple},
    )  # fmt: skip
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(
        get_device_capability=lambda *_: capability,
        current_device=lambda: 0,
        is_available=lambda: True,
        device=_Context,
        current_stream=lambda *_: missing("stream"),
    )
    torch.__dict__["cuda"] = cuda
    torch.__dict__["__getattr__"] = missing
    cuda.__dict__["__getattr__"] = missing
    sys.modules.update({"torch": torch, "torch.cuda": cuda})
    return torch
