"""Names of vLLM that our code uses and that another vLLM, in a wheel, no longer has.

    python -m tests.vllm_names vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl

Nothing is imported: our syntax trees say what is used, vLLM's sources what they define. What we import must be where we
import it from. Every other name in our files that import vLLM (attribute, method, keyword argument, string, variable of
the environment) that the installed vLLM defines must be defined in the other one too. In which class is not looked at:
most of our variables have no type that says whose attributes they are. Functions that take other arguments than in the
installed vLLM are listed as well.
"""

import ast
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("deployments", "bench", "tests")
AWAY = ("vllm/model_executor/", "vllm/models/", "vllm/benchmarks/")  # two thirds of vLLM, of which we use nothing
# A function, a class, and what stands before a colon, an equals sign or a comma in a line of its own.
_DEFINED = re.compile(r'\b(?:def|class) (\w+)|\b(\w+)"?\s*(?:[:=](?!=))|^\s+(\w+),?$', re.MULTILINE)
_IMPORTS_VLLM = re.compile(r"^\s*(?:from|import) vllm\b", re.MULTILINE)


class Sources:
    """The Python sources of one vLLM, by their paths from `vllm/` on."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files

    @classmethod
    @cache
    def installed(cls) -> "Sources":
        spec = find_spec("vllm")
        assert spec is not None and spec.origin is not None, "no vLLM is installed"
        folder = Path(spec.origin).parent
        return cls({f"vllm/{path.relative_to(folder)}": path.read_text() for path in folder.rglob("*.py")})

    @classmethod
    def of_wheel(cls, wheel: Path) -> "Sources":
        files = zipfile.ZipFile(wheel)
        names = (name for name in files.namelist() if name.startswith("vllm/") and name.endswith(".py"))
        return cls({name: files.read(name).decode() for name in names})

    def has(self, module: str, name: str) -> bool:
        """Whether a module has a name, or a package a module of this name."""
        path = module.replace(".", "/")
        text = self.files.get(f"{path}.py", self.files.get(f"{path}/__init__.py", ""))
        is_module = f"{path}/{name}.py" in self.files or f"{path}/{name}/__init__.py" in self.files
        return is_module or re.search(rf"\b{name}\b", text) is not None

    @cached_property
    def defined(self) -> set[str]:
        texts = (text for path, text in self.files.items() if not path.startswith(AWAY))
        return set(chain(*(found for text in texts for found in _DEFINED.findall(text))))

    def arguments(self, modules: set[str]) -> dict[str, str]:
        """The arguments of every function and method in these modules."""
        found: dict[str, str] = {}
        for module in modules:
            path = module.replace(".", "/")
            tree = ast.parse(self.files.get(f"{path}.py", self.files.get(f"{path}/__init__.py", "")))
            for place in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
                name = place.name + "." if isinstance(place, ast.ClassDef) else ""
                functions = (node for node in place.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
                found |= {f"{module}.{name}{node.name}": ast.unparse(node.args) for node in functions}
        return found


def files() -> dict[str, str]:
    """Ours that import vLLM."""
    paths = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    return {path: text for path, text in texts.items() if _IMPORTS_VLLM.search(text)}


def imports(text: str) -> dict[str, list[tuple[str, str]]]:
    """By local name the module and the name in it; several where one is tried after another."""
    found = defaultdict(list)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                found[alias.asname or alias.name].append((module, alias.name))
    return dict(found)


def names(text: str) -> Iterator[str]:
    """What a file may use of vLLM, beside what it imports."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if name.isidentifier():
                yield name


def gone(other: Sources, installed: Sources, ours: Mapping[str, str] | None = None) -> list[str]:
    """Names that we use and the other vLLM does not have, each with a file that uses it."""
    missing = installed.defined - other.defined
    found: dict[str, str] = {}
    for path, text in (files() if ours is None else ours).items():
        found |= {name: path for name in names(text) if name in missing}
        tried = (places for places in imports(text).values() if any(installed.has(*place) for place in places))
        found |= {".".join(places[0]): path for places in tried if not any(other.has(*place) for place in places)}
    return [f"{name} ({path})" for name, path in sorted(found.items())]


def changed(other: Sources, installed: Sources) -> list[str]:
    """Functions of a name that we use which take other arguments than before."""
    texts = files().values()
    used = set(chain(*map(names, texts)))
    modules = {module for text in texts for places in imports(text).values() for module, _ in places}
    old, new = installed.arguments(modules), other.arguments(modules)
    differing = sorted(path for path in old.keys() & new.keys() if old[path] != new[path])
    return [
        f"{path}\n    from ({old[path]})\n    to   ({new[path]})"
        for path in differing
        if path.rpartition(".")[2] in used or path.endswith(".__init__")
    ]


def main() -> None:
    other, installed = Sources.of_wheel(Path(sys.argv[1])), Sources.installed()
    missing = gone(other, installed)
    print("\n".join(missing) or "all names are there")
    print("\n".join(["", "Other arguments:", *changed(other, installed)]))
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
