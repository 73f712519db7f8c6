"""What the installed release of vLLM knows, and what is installed beside it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from sm75.serve.sdist import HERE

_ROOT = Path(__file__).parents[2]
# Where packages bring vLLM methods and architectures of their own
# (vllm/plugins/__init__.py, DEFAULT_PLUGINS_GROUP).
_PLUGINS = "vllm.general_plugins"


class Method(msgspec.Struct, frozen=True):
    """A quantization method, as its class says.

    Attributes:
        name: The class.
        capability: The least compute capability, times ten.
        types: Types of activations; empty: it does not say plainly.
    """

    name: str = msgspec.field(name="class")
    capability: int
    types: tuple[str, ...]


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """A flag of ``vllm serve``; :mod:`sm75.serve.sdistflags` reads them.

    Attributes:
        takes: ``switch``; ``pair``: with a ``--no-``; ``maybe``, ``many``: texts; ``int``;
            ``human``: with a unit; ``auto``: that or ``auto``; ``float``; ``text``.
        also: Other names.
        none: Whether ``None`` is a value.
        choices: The only values; empty: others too.
        of: The field that it sets.
        ge, gt, le, lt: Bounds: at least, above, at most, below.
    """

    takes: str
    also: tuple[str, ...] = ()
    none: bool = False
    choices: tuple[str | int, ...] = ()
    of: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A release's tables; :mod:`sm75.serve.sdist` makes them.

    Attributes:
        source: Name and sha256 of the sdist.
        methods: Quantization methods.
        deprecated: Those that need ``--allow-deprecated-quantization``.
        online: Names of ``--quantization`` that quantize while loading.
        schemes: Least capability of the schemes of compressed-tensors and Quark.
        gptq_bits: Bits of GPTQ that it takes, with whether they are symmetric.
        awq_bits: Bits of AWQ.
        act_order: Whether it takes GPTQ's activation order in groups.
        marlin: Types of Marlin's kernels for 7.5: activations, weights, scales.
        architectures: By kind: generate, multimodal, transformers, draft, pooling.
        gone: Architectures that are not supported any more, with the last release.
        elsewhere: Architectures that a plugin has, with its address.
        suffixes: Ends of names, with the runner that is taken for them.
        not_in_float16: Model types that are refused in float16, with the reason.
        flags: Those of ``vllm serve``, by name.
        inverse: Whether ``--enable-x`` has a ``--disable-x``.
    """

    source: dict[str, str]
    methods: dict[str, Method]
    deprecated: tuple[str, ...]
    online: tuple[str, ...]
    schemes: dict[str, int]
    gptq_bits: tuple[tuple[int, bool], ...]
    awq_bits: tuple[int, ...]
    act_order: bool
    marlin: tuple[tuple[str, str, str], ...]
    architectures: dict[str, tuple[str, ...]]
    gone: dict[str, str]
    elsewhere: dict[str, str]
    suffixes: tuple[tuple[str, str], ...]
    not_in_float16: dict[str, str]
    flags: dict[str, Flag]
    inverse: bool


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment.

    Attributes:
        release: vLLM's; where none is seen, the one of ``lock/default``.
        site: Its packages; nothing where there is no environment.
        plugins: Packages that bring vLLM methods or architectures.
    """

    release: str
    site: Path | None = None
    plugins: tuple[str, ...] = ()

    @property
    def known(self) -> Known | None:
        """The release's tables; nothing for one that was not read."""
        path = HERE / f"{self.release}.json"
        return msgspec.json.decode(path.read_bytes(), type=Known) if path.is_file() else None

    def lacks(self, module: str) -> bool:
        """Whether a module is missing, as it is in the channel."""
        return self.site is None or not (self.site / module).is_dir()


def look(program: Path) -> Installed:
    """What the environment of a program has.

    Args:
        program: vLLM's; a bare name where there is no environment.
    """
    default = (_ROOT / "lock" / "default").read_text(encoding="utf-8").strip()
    sites = sorted(program.parent.parent.glob("lib/python3.*/site-packages"))
    if not program.is_absolute() or not sites:
        return Installed(release=default)
    plugins, release = [], default
    for found in metadata.distributions(path=[str(sites[-1])]):
        name = found.metadata["Name"]
        if name == "vllm":
            release = found.version
        elif any(point.group == _PLUGINS for point in found.entry_points):
            plugins.append(name)
    return Installed(release=release, site=sites[-1], plugins=tuple(sorted(plugins)))
