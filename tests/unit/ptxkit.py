"""A GPU of memory and nothing else: runs the PTX of ``bench --memory`` instruction by instruction.

The text is turned into Python, so that what is tested is what a driver would be given. It knows the
instructions of that file, and refuses any other, any unaligned access, and any outside of what was
allocated. Its times are this machine's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from sm75.bench.cuda import Device

_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)\s*\{(.*?)\n\}", re.DOTALL)
_SPECIAL = {"%ctaid.x": "block", "%ntid.x": "size", "%tid.x": "thread", "%nctaid.x": "grid"}

Kernel = Callable[..., None]


def _name(operand: str) -> str:
    if operand in _SPECIAL:
        return _SPECIAL[operand]
    return operand.replace("%", "r_") if operand.startswith("%") else str(int(operand))


def _statement(line: str) -> str:
    """One instruction as Python."""
    operation, _, rest = line.partition(" ")
    vector = re.search(r"\{([^}]*)\}", rest)
    if vector:
        address = re.search(r"\[(%\w+)\]", rest)
        assert address
        words = ", ".join(_name(one.strip()) for one in vector[1].split(","))
        place = _name(address[1])
        if operation == "ld.global.v4.u32":
            return f"{words} = load({place}, 4)"
        assert operation == "st.global.v4.u32", line
        return f"store({place}, ({words}))"
    parts = [part.strip() for part in rest.split(",")]
    if operation.startswith("ld.param."):
        return f"{_name(parts[0])} = p_{parts[1].strip('[]')}"
    if operation == "st.global.u32":
        return f"store({_name(parts[0].strip('[]'))}, ({_name(parts[1])},))"
    target, *sources = map(_name, parts)
    a, b, c = (*sources, "", "")[:3]
    return {
        "mov.u32": f"{target} = {a}",
        "cvt.u64.u32": f"{target} = {a}",
        "cvt.u32.u64": f"{target} = {a} & {_M32}",
        "mul.wide.u32": f"{target} = {a} * {b}",
        "mul.lo.u64": f"{target} = {a} * {b} & {_M64}",
        "mad.lo.u32": f"{target} = ({a} * {b} + {c or 0}) & {_M32}",
        "add.u32": f"{target} = ({a} + {b}) & {_M32}",
        "add.u64": f"{target} = ({a} + {b}) & {_M64}",
        "shl.b64": f"{target} = {a} << {b} & {_M64}",
        "setp.ge.u64": f"{target} = {a} >= {b}",
    }[operation]


def translate(ptx: str) -> dict[str, tuple[list[str], str]]:
    """Parameters and Python source of each kernel: one thread of it."""
    found = {}
    for name, parameters, body in _ENTRY.findall(re.sub(r"//[^\n]*", "", ptx)):
        names = re.findall(r"\.param \.(?:u32|u64) (\w+)", parameters)
        labels: list[str] = [""]
        blocks: list[list[str]] = [[]]
        for line in (part.strip() for part in body.splitlines()):
            if line.endswith(":"):
                labels.append(line[:-1])
                blocks.append([])
            elif line and not line.startswith(".reg"):
                blocks[-1].append(line.removesuffix(";"))
        given = ", ".join(f"p_{one}" for one in names)
        source = [f"def kernel(load, store, block, size, thread, grid, {given}):"]
        source += [" at = 0", " while True:"]
        for number, lines in enumerate(blocks):
            source.append(f"  if at == {number}:")
            source.append(f"   at = {number + 1}")
            for line in lines:
                if line == "ret":
                    source.append("   return")
                elif jump := re.fullmatch(r"(?:@(%\w+) )?bra (\w+)", line):
                    when = f"if {_name(jump[1])}: " if jump[1] else ""
                    # A jump leaves the block at once.
                    source.append(f"   {when}at = {labels.index(jump[2])}")
                    source.append(f"   {when}continue")
                else:
                    source.append(f"   {_statement(line)}")
        found[name] = (names, "\n".join(source))
    return found


class Gpu:
    """What ``sm75.bench.cuda.Driver`` is, without a GPU."""

    def __init__(self, **changes: Any) -> None:
        facts: dict[str, Any] = {
            "name": "no GPU", "capability": (7, 5), "multiprocessors": 2, "threads": 256,
            "l2": 1024, "theoretical": 320.0, "free": 1 << 20, "total": 1 << 20, "driver": "1.2",
            "cuda": "13.0",
        }  # fmt: skip
        self.device = Device(**facts | changes)
        self.memory = memoryview(bytearray(1 << 20)).cast("I")
        self.held: dict[int, int] = {}
        self.launched: list[str] = []
        self.kernels: dict[str, tuple[list[str], Kernel]] = {}
        self._next = 256

    def load(self, ptx: bytes) -> None:
        for name, (parameters, source) in translate(ptx.decode()).items():
            scope: dict[str, Any] = {}
            exec(source, scope)  # noqa: S102
            self.kernels[name] = (parameters, scope["kernel"])

    def _place(self, address: int, words: int) -> int:
        assert address % (4 * words) == 0, "unaligned"
        end = address + 4 * words
        inside = (start <= address and end <= start + size for start, size in self.held.items())
        assert any(inside), "outside of what is allocated"
        return address // 4

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any]) -> None:
        self.launched.append(kernel)
        names, code = self.kernels[kernel]
        assert len(values) == len(names)

        def read(address: int, words: int) -> list[int]:
            place = self._place(address, words)
            return self.memory[place : place + words].tolist()

        def write(address: int, words: Sequence[int]) -> None:
            place = self._place(address, len(words))
            for number, word in enumerate(words):
                self.memory[place + number] = word

        numbers = [value.value for value in values]
        for block in range(blocks):
            for thread in range(threads):
                code(read, write, block, threads, thread, blocks, *numbers)

    def allocate(self, size: int) -> int:
        address = self._next
        self._next += -(-size // 256) * 256 + 256
        self.held[address] = size
        return address

    def free(self, address: int) -> None:
        del self.held[address]

    def fill(self, address: int, word: int, count: int) -> None:
        for number in range(count):
            self.memory[address // 4 + number] = word

    def copy(self, target: int, source: int, size: int) -> None:
        self.launched.append("driver copy")
        a, b, n = target // 4, source // 4, size // 4
        self.memory[a : a + n] = self.memory[b : b + n]

    def fetch(self, address: int, size: int) -> bytes:
        return self.memory[address // 4 : (address + size) // 4].tobytes()

    def timed(self, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
