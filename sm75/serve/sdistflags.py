"""The flags of ``vllm serve``, read from a release's sources: names, and what a value may be.

Followed: ``_compute_kwargs`` of ``vllm/engine/arg_utils.py``, by which vLLM makes an argument of a
field of a configuration class, and the ``add_argument`` calls there and of ``make_arg_parser``.
The sources are parsed, never run; what is not plain is taken as any text.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# What is read: the engine's flags, the server's (as 0.33.0 and 0.28.0 have them), the classes.
_ENGINE = "vllm/engine/arg_utils.py"
_SERVERS = ("vllm/entrypoints/common/cli_args.py", "vllm/entrypoints/openai/cli_args.py")
_PARSER = "vllm/utils/argparse_utils.py"
_CONFIGS = "vllm/config/"
# Classes that are always made, so that the bounds of their fields hold whatever else is asked.
_ALWAYS = ("ModelConfig", "CacheConfig", "SchedulerConfig", "ParallelConfig")
_BOUNDS = ("ge", "gt", "le", "lt")
_PLAIN = ("bool", "int", "float", "str", "dict", "list", "tuple", "set")
# What wraps a type without changing what an argument takes.
_WRAPS = ("Annotated", "SkipValidation", "InitVar")

Kind = dict[str, Any]


def wanted(path: str) -> bool:
    """Whether a file is needed."""
    return path in (_ENGINE, _PARSER, *_SERVERS) or path.startswith(_CONFIGS)


def read(sources: Mapping[str, bytes]) -> tuple[dict[str, Kind], bool]:
    """Read the flags.

    Args:
        sources: Files by path.

    Returns:
        By long name: ``takes`` (``switch``, ``pair`` with ``--no-``, ``maybe``, ``many``, ``int``,
        ``human``, ``auto``, ``float`` or ``text``), ``also`` (other names), ``none`` (``None`` is
        taken), ``choices``, bounds, ``of`` (the field); and whether ``--enable-x`` has a
        ``--disable-x``.

    Raises:
        KeyError, StopIteration: They are built otherwise than is known here.
    """
    modules = {path: ast.parse(text) for path, text in sources.items() if wanted(path)}
    server = next(path for path in _SERVERS if path in modules)
    classes = _Classes(modules.values(), _human(modules[_ENGINE]))
    found: dict[str, Kind] = {}
    calls = [*_calls(modules[server], "make_arg_parser", classes),
             *_calls(modules[_ENGINE], "add_cli_args", classes)]  # fmt: skip
    for names, kind in calls:
        long = next(name for name in names if name.startswith("--"))
        found[long] = kind | {"also": [name for name in names if name != long]}
    changed = _changed(modules[server])
    for field in classes.fields("FrontendArgs"):
        kind = _adapted(classes.kind("FrontendArgs", field), changed.get(field, {}))
        found[f"--{field.replace('_', '-')}"] = kind | {"of": f"FrontendArgs.{field}"}
    both = b"class EnableDisableAction" in sources[_PARSER]
    return {name: _bare(kind) for name, kind in sorted(found.items())}, both


def _bare(kind: Kind) -> Kind:
    """Without what says nothing; a bound of 0 says something."""
    return {key: value for key, value in kind.items()
            if value is not False and value not in (None, "", [])}  # fmt: skip


@dataclass(frozen=True)
class _Type:
    """The members of a union: plain names, ``None``, ``other``, and the options of a literal."""

    names: frozenset[str]
    options: tuple[Any, ...] = ()

    def __or__(self, other: _Type) -> _Type:
        return _Type(self.names | other.names, self.options or other.options)


class _Classes:
    """Configuration classes and the types that their modules name."""

    def __init__(self, modules: Iterable[ast.Module], human: Collection[str]) -> None:
        self._human = human
        self._found: dict[str, ast.ClassDef] = {}
        self._types: dict[str, ast.expr] = {}
        for module in modules:
            for node in module.body:
                if isinstance(node, ast.ClassDef):
                    self._found.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._types.setdefault(node.targets[0].id, node.value)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    self._types.setdefault(node.target.id, node.value or node.annotation)

    def fields(self, name: str) -> dict[str, ast.AnnAssign]:
        """A class's fields, with those of its bases."""
        node = self._found.get(name)
        if node is None:
            return {}
        found: dict[str, ast.AnnAssign] = {}
        for base in node.bases:
            if isinstance(base, ast.Name):
                found |= self.fields(base.id)
        return found | {
            part.target.id: part
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            and "ClassVar" not in ast.unparse(part.annotation)
        }  # fmt: skip

    def type(self, node: ast.expr, depth: int = 0) -> _Type:
        """An annotation's members."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.type(node.left, depth) | self.type(node.right, depth)
        if isinstance(node, ast.Constant) and node.value is None:
            return _Type(frozenset(["None"]))
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).rpartition(".")[2]
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name in _WRAPS:
                return self.type(inner[0], depth)
            if name == "Literal":
                return _Type(frozenset(["Literal"]), self._options(inner))
            if name in ("Optional", "Union"):
                start = _Type(frozenset(["None"] if name == "Optional" else []))
                for one in inner:
                    start |= self.type(one, depth)
                return start
            return _Type(frozenset([name if name in _PLAIN else "other"]))
        if isinstance(node, ast.Name):
            if node.id in _PLAIN:
                return _Type(frozenset([node.id]))
            if node.id in self._found:
                data = any("dataclass" in ast.unparse(one) or ast.unparse(one).startswith("config")
                           for one in self._found[node.id].decorator_list)  # fmt: skip
                return _Type(frozenset(["data" if data else "other"]))
            if node.id in self._types and depth < 5:
                return self.type(self._types[node.id], depth + 1)
        return _Type(frozenset(["other"]))

    @staticmethod
    def _options(inner: list[ast.expr]) -> tuple[Any, ...]:
        if all(isinstance(one, ast.Constant) for one in inner):
            return tuple(one.value for one in inner if isinstance(one, ast.Constant))
        return ()

    def kind(self, name: str, field: str) -> Kind:
        """What the argument of a field takes (``_compute_kwargs``, in its order)."""
        node = self.fields(name)[field]
        found = self.type(node.annotation)
        names, none = found.names, "None" in found.names
        kind: Kind = {"takes": "text", "none": none, "of": f"{name}.{field}"}
        if "data" in names:
            pass
        elif names == {"bool", "str", "None"}:
            kind = {"takes": "maybe"}
        elif "bool" in names:
            kind = {"takes": "pair"}
        elif "Literal" in names:
            numbers = bool(found.options) and all(type(one) is int for one in found.options)
            kind["takes"] = "int" if numbers else "text"
            if "str" not in names:
                kind["choices"] = list(found.options)
        elif names & {"tuple", "list", "set"}:
            kind["takes"] = "many"
        elif "int" in names:
            kind["takes"] = "auto" if field == "max_model_len" else (
                "human" if field in self._human else "int")  # fmt: skip
        elif "float" in names:
            kind["takes"] = "float"
        if kind["takes"] in ("int", "human", "auto", "float") and name in _ALWAYS:
            kind |= _bounds(node.value)
        return kind


def _human(engine: ast.Module) -> list[str]:
    """Fields whose numbers may end in k or M."""
    name = "human_readable_int_args"
    return next(
        list(ast.literal_eval(node.value)) for node in ast.walk(engine)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )  # fmt: skip


def _bounds(value: ast.expr | None) -> Kind:
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "Field":
        return {}
    return {
        str(key.arg): key.value.value
        for key in value.keywords
        if key.arg in _BOUNDS and isinstance(key.value, ast.Constant)
    } | {
        str(key.arg): ast.literal_eval(key.value)
        for key in value.keywords
        if key.arg in _BOUNDS and isinstance(key.value, ast.UnaryOp)
    }


def _calls(
    module: ast.Module, function: str, classes: _Classes
) -> Iterator[tuple[list[str], Kind]]:
    """The names and the kind of each ``add_argument`` of the functions of a name."""
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef) or node.name != function:
            continue
        tables = dict(_tables(node))
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
                texts = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
                if names := [text for text in texts if text.startswith("-")]:
                    yield names, _argument(call, tables, _changed(node), classes)


def _tables(node: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """Class by the name of a variable, and the field where the variable is of one alone."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Assign) or not isinstance(part.targets[0], ast.Name):
            continue
        value, field = part.value, ""
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
            field, value = str(value.slice.value), value.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "get_kwargs":
            yield part.targets[0].id, (ast.unparse(value.args[0]), field)
        elif field and isinstance(value, ast.Name):
            yield part.targets[0].id, (value.id, field)


def _changed(node: ast.AST) -> dict[str, dict[str, str]]:
    """What is changed afterwards, by field or variable: ``type``, ``nargs``, ``choices``."""
    found: dict[str, dict[str, str]] = {}
    for part in ast.walk(node):
        target: ast.expr | None = None
        value = ""
        if isinstance(part, ast.Assign):
            target, value = part.targets[0], ast.unparse(part.value)
        elif isinstance(part, ast.AugAssign):
            target = part.target
        elif isinstance(part, ast.Delete):
            target = part.targets[0]
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            target = part.func.value  # …["choices"].remove(…)
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            where = target.value
            if isinstance(where, ast.Subscript) and isinstance(where.slice, ast.Constant):
                found.setdefault(str(where.slice.value), {})[str(target.slice.value)] = value
            elif isinstance(where, ast.Name):
                found.setdefault(where.id, {})[str(target.slice.value)] = value
    return found


def _adapted(kind: Kind, changed: Mapping[str, str]) -> Kind:
    """A field's kind after what is changed in it: any text, where that is its type or choices."""
    if "type" in changed or "nargs" in changed:
        takes = "many" if kind["takes"] == "many" and "nargs" not in changed else "text"
        return {**kind, "takes": takes, "choices": []}
    return {**kind, "choices": []} if "choices" in changed else kind


def _argument(
    call: ast.Call, tables: Mapping[str, tuple[str, str]], changed: Mapping[str, Mapping[str, str]],
    classes: _Classes,
) -> Kind:  # fmt: skip
    given = {key.arg: key.value for key in call.keywords if key.arg}
    for key in call.keywords:
        if key.arg is not None:
            continue
        at = key.value
        if isinstance(at, ast.Dict):  # {**kwargs["field"], "default": None}
            at = next(of for of, name in zip(at.values, at.keys, strict=True) if name is None)
        if isinstance(at, ast.Subscript) and isinstance(at.value, ast.Name):
            name, field = tables[at.value.id][0], str(ast.literal_eval(at.slice))
            return _adapted(classes.kind(name, field), changed.get(field, {}))
        if isinstance(at, ast.Name):
            table, field = tables[at.id]
            name = tables[table][0] if table in tables else table
            changes = {**changed.get(at.id, {}), **changed.get(field, {})}
            return _adapted(classes.kind(name, field), changes)
        raise KeyError(ast.unparse(key.value))
    action = ast.unparse(given["action"]) if "action" in given else ""
    if "store_true" in action:
        return {"takes": "switch"}
    if "BooleanOptionalAction" in action:
        return {"takes": "pair"}
    kind = ast.unparse(given["type"]) if "type" in given else ""
    choices = given.get("choices")
    return {
        "takes": kind if kind in ("int", "float") else "text",
        "choices": ast.literal_eval(choices) if isinstance(choices, ast.List) else [],
    }
