"""Make a module of Triton 3.7 kernels readable for Triton 3.2, and refuse what is not known.

Three things differ for vLLM's attention kernels, and each is rewritten to what means the same:

- ``a and b and c``: the front end of 3.2 takes boolean operators of two operands only;
- annotations of parameters that are no type of Triton (``int | None``): they are dropped, since an
  argument's type is given when it is compiled;
- ``tl.make_tensor_descriptor`` is not there: what names it in a branch that a constant switches off
  may name it, and is never compiled. ``worker`` has a stand-in that raises where it is.

Everything else that 3.2 may not know is looked for and refused: names of ``tl`` that it lacks,
other annotations, statements that its compiler does not visit.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from sm75.errors import BuildError

# Annotations that both Tritons read: https://github.com/triton-lang/triton, python/triton/language.
_TYPES = {"constexpr", "int1", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64",
          "float16", "float32", "pointer_type"}  # fmt: skip
# What the code generator of Triton 3.2 visits (python/triton/compiler/code_generator.py, the
# visit_ methods of release 3.2.0).
_STATEMENTS = (
    ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.While, ast.If, ast.Expr,
    ast.Pass, ast.Assert,
)  # fmt: skip
_EXPRESSIONS = (ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
# Named in branches that are switched off, and nowhere else.
DEAD = ("make_tensor_descriptor",)


class _Adapter(ast.NodeTransformer):
    """Rewrites the functions that Triton compiles."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        left = node.values[0]
        for right in node.values[1:]:
            left = ast.BoolOp(op=node.op, values=[left, right])
        if len(node.values) > 2:
            self.changed.append(f"line {node.lineno}: a boolean operator of {len(node.values)}")
        return left

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None and _foreign(argument.annotation):
                self.changed.append(f"line {argument.lineno}: the annotation of {argument.arg}")
                argument.annotation = None
        return node


def _foreign(annotation: ast.expr) -> bool:
    """Whether it is the one annotation that is no type of Triton and is known: ``int | None``."""
    return ast.unparse(annotation) in ("int | None", "Optional[int]", "float | None")


def is_kernel(node: ast.AST) -> bool:
    """Whether it is a function that Triton compiles."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(one).partition("(")[0] in ("triton.jit", "jit") for one in node.decorator_list
    )


def adapt(source: str, name: str, language: Collection[str]) -> tuple[str, list[str]]:
    """Rewrite a module.

    Args:
        source: Its text.
        name: For messages.
        language: Names that ``triton.language`` of Triton 3.2 has.

    Returns:
        The text, without comments, and what was changed.

    Raises:
        BuildError: It has something that Triton 3.2 is not known to read the same way.
    """
    tree = ast.parse(source)
    adapter = _Adapter()
    for place, node in enumerate(tree.body):
        if is_kernel(node):
            tree.body[place] = adapter.visit(node)
            if found := list(_unknown(tree.body[place], language)):
                raise BuildError(
                    f"{name}: Triton 3.2 is not known to read this kernel as it is meant",
                    why="; ".join(found[:5]),
                    fix="see whether Triton 3.2 has another form of it, and add it to "
                    "sm75/aot/adapt.py",
                )
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", adapter.changed


def _unknown(kernel: ast.stmt, language: Collection[str]) -> Iterator[str]:
    assert isinstance(kernel, ast.FunctionDef)  # noqa: S101
    where = f"{kernel.name}, line"
    for argument in (*kernel.args.posonlyargs, *kernel.args.args, *kernel.args.kwonlyargs):
        if argument.annotation is not None:
            text = ast.unparse(argument.annotation)
            if text.removeprefix("tl.") not in _TYPES or not text.startswith("tl."):
                yield f"{where} {argument.lineno}: {argument.arg} is annotated {text}"
    if kernel.args.vararg or kernel.args.kwarg:
        yield f"{where} {kernel.lineno}: it takes any number of arguments"
    for node in ast.walk(kernel):
        if node is kernel:
            continue
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            yield f"{where} {node.lineno}: a {type(node).__name__} statement"
        if isinstance(node, ast.AnnAssign):
            text = ast.unparse(node.annotation)
            if text.removeprefix("tl.") not in _TYPES:
                yield f"{where} {node.lineno}: annotated {text}"
        if isinstance(node, _EXPRESSIONS):
            yield f"{where} {node.lineno}: a {type(node).__name__}"
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "tl"
            and node.attr not in language
            and node.attr not in DEAD
        ):
            yield f"{where} {node.lineno}: tl.{node.attr}, which Triton 3.2 has not"
