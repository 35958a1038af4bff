"""The names of vLLM that our code uses, held against the sources of a vLLM: installed, or in a wheel.

    python -m tests.vllm_names vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl

Nothing is imported: our syntax trees say what is used, vLLM's say what is there. Of the uses these are found: imports;
attributes and keyword arguments of what is imported, of variables annotated with it, of `self` and `super()` in classes
derived from it; variables of the environment. What cannot be read off that way (methods that vLLM calls on us, names in
strings, attributes of variables of type Any) stands in `BESIDES`. Where the type of an attribute cannot be told, what
follows it is taken to be there.

Of a wheel it prints as well which functions of those take other arguments than in the vLLM that is installed.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("deployments", "bench", "tests")
VLLM = "vllm"
CALL = "()"  # in a path: what comes of calling what stands before it
OR = " | "  # between two paths, one of which is there
ENVIRONMENT = re.compile("VLLM_[A-Z0-9_]+")

# Names in strings: (file, variable) whose words are attributes of a class.
IN_STRINGS = {
    ("deployments/engines/vllm/codec.py", "_LOOKS_BACK"): "vllm.sampling_params.SamplingParams",
    ("deployments/engines/vllm/front_end.py", "_OF_ENGINES_ALONE"): "vllm.engine.arg_utils.EngineArgs",
}
# What we override, patch or read without a type that says whose it is.
BESIDES = {
    "vllm.config.VllmConfig": "additional_config kv_transfer_config max_in_flight_tokens structured_outputs_config",
    "vllm.connections.HTTPConnection": "_async_client get_async_client get_sync_client",
    "vllm.engine.arg_utils.AsyncEngineArgs": """
        _api_process_count disable_log_stats enable_log_requests model renderer_num_workers speculative_config""",
    "vllm.entrypoints.cli.main": "main",
    "vllm.platforms.cpu.CpuPlatform": "discover_numa_topology",
    "vllm.renderers.base.BaseRenderer": "_tokenize_prompt_async model_config render_chat_async",
    "vllm.sampling_params.SamplingParams": """
        _validate_structured_outputs extra_args ignore_eos logprob_token_ids min_tokens output_kind
        prompt_logprob_token_ids routed_experts_prompt_start""",
    "vllm.sampling_params.StructuredOutputsParams": """
        _backend _backend_was_auto all_constraints_none choice grammar json""",
    "vllm.utils.argparse_utils.FlexibleArgumentParser": "load_config_file",
    "vllm.v1.core.block_pool.BlockHashToBlockMap": "_cache insert pop",
    "vllm.v1.core.block_pool.BlockPool": """
        cached_block_hash_to_block get_num_free_blocks hash_block_size num_gpu_blocks""",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": """
        block_pool coordinator enable_caching get_block_ids log_stats prefix_cache_stats usage watermark_blocks""",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": """
        _free_request _holds_kv_blocks _inflight_prefills _update_after_schedule _update_from_kv_xfer_finished
        _update_request_as_session _update_request_with_output add_request deferred_waiting
        finished_recving_kv_req_ids get_request_counts kv_holding_waiting max_num_active_reqs
        max_num_scheduled_tokens num_waiting_for_streaming_input prefill_capacity_bound schedule
        update_from_output waiting""",
    "vllm.v1.core.sched.request_queue.RequestQueue": """
        add_request peek_request pop_request prepend_request prepend_requests remove_request remove_requests""",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": """
        block_pool block_size kv_cache_spec max_admission_blocks_per_request use_eagle""",
    "vllm.v1.engine.EngineCoreOutput": """
        kv_transfer_params new_logprobs new_prompt_logprobs_tensors new_sampling_mask new_token_ids
        prefill_stats prompt_token_id_logprobs request_id routed_experts""",
    "vllm.v1.engine.EngineCoreReadyResponse": "block_size max_model_len max_num_batched_tokens max_num_seqs",
    "vllm.v1.engine.EngineCoreRequest": """
        abort_immediately lora_request mm_features prompt_embeds prompt_token_ids request_id resumable
        sampling_params""",
    "vllm.v1.engine.async_llm.AsyncLLM": """
        _add_request abort add_request check_admission check_health engine_core errored get_supported_tasks
        input_processor model_config notify_kv_transfer_request_rejected output_processor renderer vllm_config""",
    "vllm.v1.engine.core.EngineCore": "scheduler vllm_config",
    "vllm.v1.engine.core.EngineCoreProc": "ENGINE_CORE_DEAD add_lora run_engine_core",
    "vllm.v1.engine.core_client.EngineCoreClient": """
        abort_requests_async add_lora_async add_request_async get_output_async get_supported_tasks_async
        reset_mm_cache_async shutdown""",
    "vllm.v1.engine.core_client.AsyncMPClient": "engine_ranks_managed resources",
    "vllm.v1.engine.input_processor.InputProcessor": "structured_outputs_config",
    "vllm.v1.engine.output_processor.OutputProcessor": "abort_requests",
    "vllm.v1.engine.utils.EngineHandshakeMetadata": "addresses parallel_config",
    "vllm.v1.engine.utils.EngineZmqAddresses": "inputs outputs",
    "vllm.v1.kv_cache_interface.KVCacheSpec": "max_memory_usage_bytes page_size_bytes",
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": "first_spec",
    "vllm.v1.metrics.stats.PrefillStats": "num_cached_tokens",
    "vllm.v1.metrics.stats.PrefixCacheStats": "hits queries",
    "vllm.v1.request.Request": """
        arrival_time drop_stale_output is_prefill_chunk kv_transfer_params max_tokens next_decode_eligible_step
        num_computed_tokens num_output_placeholders num_output_tokens num_prompt_tokens num_stale_output_tokens
        num_tokens structured_output_request""",
    "vllm.v1.structured_output.StructuredOutputManager": "executor",
    "vllm.v1.structured_output.backend_types.StructuredOutputBackend": "allocate_token_bitmask compile_grammar",
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar": "fill_bitmask",
}


# What a vLLM has


@dataclass(frozen=True)
class Found:
    """Where a name leads: `node` is what defines it, None for a module or for something of a type not known."""

    module: str
    node: ast.AST | None = None


class Sources:
    """The Python sources of one vLLM."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        """read: the text of a path as `vllm/v1/request.py`; None where there is no such file."""
        self.read = read
        self._trees: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.AST]] = {}

    @classmethod
    def installed(cls) -> "Sources":
        spec = find_spec("vllm")
        assert spec is not None and spec.origin is not None, "no vLLM is installed"
        above = Path(spec.origin).parents[1]
        return cls(lambda path: (above / path).read_text() if (above / path).is_file() else None)

    @classmethod
    def of_wheel(cls, wheel: Path) -> "Sources":
        files = zipfile.ZipFile(wheel)
        names = frozenset(files.namelist())
        return cls(lambda path: files.read(path).decode() if path in names else None)

    def has(self, path: str) -> bool:
        """Whether a dotted path from `vllm` on exists; with `name=` at its end, whether that argument does."""
        return any(self._found(each.split(".")) is not None for each in path.split(OR))

    def arguments(self, path: str) -> str | None:
        """Of a function or of what makes a class; None of anything else, and where the path is not there."""
        found = self._found(path.split("."))
        node = found.node if found is not None else None
        if found is not None and isinstance(node, ast.ClassDef):
            node = self._maker(found)
        return ast.unparse(node.args) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def _maker(self, found: Found) -> ast.FunctionDef | None:
        made = [
            _members(each.node).get("__init__") for each in self._bases(found) if isinstance(each.node, ast.ClassDef)
        ]
        return next((each for each in made if isinstance(each, ast.FunctionDef)), None)

    def _found(self, parts: Sequence[str]) -> Found | None:
        found: Found | None = Found(parts[0])
        for part in parts[1:]:
            if found is None or (found.node is None and self._tree(found.module) is None):
                return found  # whatever it is: what stands behind it is not known
            found = self._step(found, part)
        return found

    def _step(self, found: Found, part: str) -> Found | None:
        module, node = found.module, found.node
        if node is None:
            return self._in_module(module, part)
        if part == CALL:
            return self._result(found)
        if part.endswith("="):
            return found if self._takes(found, part[:-1]) else None
        if isinstance(node, ast.ClassDef):
            return self._of_class(found, part)
        return Found("")

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self.read(f"{path}.py") if (init := self.read(f"{path}/__init__.py")) is None else init
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _in_module(self, module: str, name: str, depth: int = 0) -> Found | None:
        if (tree := self._tree(module)) is None or depth > 20:
            return Found("") if tree is None else None
        if module not in self._names:
            self._names[module] = dict(_bindings(tree.body))
        names = self._names[module]
        if isinstance(node := names.get(name), ast.ImportFrom):
            source = self._source(module, node)
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return self._in_module(source, original, depth + 1) if source.startswith("vllm") else Found("")
        if node is not None:
            return Found("") if isinstance(node, ast.Import) else Found(module, node)
        if self._tree(f"{module}.{name}") is not None:
            return Found(f"{module}.{name}")
        return self._lazily(module, tree, name, depth)

    def _lazily(self, module: str, tree: ast.Module, name: str, depth: int) -> Found | None:
        """By a star, or by the module's own `__getattr__`, which knows the name as a string and often its place."""
        names = self._names[module]
        for star in (node for key, node in names.items() if key.startswith("*")):
            assert isinstance(star, ast.ImportFrom)
            if found := self._in_module(self._source(module, star), name, depth + 1):
                return found
        if "__getattr__" not in names:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if _text(key) == name and ":" in (place := _text(value)):
                        source, original = place.split(":")
                        return self._in_module(module + source if source[0] == "." else source, original, depth + 1)
        return Found("") if any(_text(node) == name for node in ast.walk(tree)) else None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.read(module.replace(".", "/") + "/__init__.py") is not None
        parts = module.split(".")
        above = parts[: len(parts) + is_package - node.level]
        return ".".join([*above, *filter(None, [node.module])])

    def _bases(self, found: Found) -> Iterator[Found]:
        """A class and those that it is derived from, as far as they are vLLM's."""
        assert isinstance(found.node, ast.ClassDef)
        yield found
        for base in found.node.bases:
            above = self._type(found.module, base)
            if above is not None and isinstance(above.node, ast.ClassDef) and above.node is not found.node:
                yield from self._bases(above)

    def _of_class(self, found: Found, name: str) -> Found | None:
        if name.startswith("__"):
            return Found("")
        for each in self._bases(found):
            assert isinstance(each.node, ast.ClassDef)
            if (node := _members(each.node).get(name)) is None:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
                return self._type(each.module, node.returns) or Found("") if is_property else Found(each.module, node)
            return self._type(each.module, node) or Found("")
        return None

    def _result(self, found: Found) -> Found:
        if isinstance(found.node, ast.ClassDef):
            return found
        if isinstance(found.node, ast.FunctionDef):
            return self._type(found.module, found.node.returns) or Found("")
        return Found("")

    def _takes(self, found: Found, argument: str) -> bool:
        node = found.node
        if isinstance(node, ast.ClassDef):
            maker = self._maker(found)
            return _takes(maker, argument) if maker is not None else self._of_class(found, argument) is not None
        return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _takes(node, argument)

    def _type(self, module: str, node: ast.AST | None) -> Found | None:
        """The class that an annotation or a base names, where it is one of vLLM's."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):  # X | None
            return self._type(module, node.left)
        if isinstance(node, ast.Subscript):
            is_optional = ast.unparse(node.value) == "Optional"
            return self._type(module, node.slice if is_optional else node.value)
        if not isinstance(node, ast.Name):
            return None
        found = self._in_module(module, node.id)
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _takes(function: ast.FunctionDef | ast.AsyncFunctionDef, argument: str) -> bool:
    arguments = function.args
    return arguments.kwarg is not None or argument in {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements bind, with what they are bound to: also under `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield (f"*{node.module}" if alias.name == "*" else alias.asname or alias.name), node
        elif isinstance(node, ast.Assign):
            bound = [each for target in node.targets for each in ast.walk(target)]
            yield from ((each.id, node) for each in bound if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation
        else:
            for block in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(node, block, None) or ()
                yield from _bindings([one for each in inner for one in getattr(each, "body", [each])])


def _members(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """Of the class itself: what its body binds, and what its methods set on `self`, with the annotation where there
    is one."""
    found = dict(_bindings(cls.body))
    for method in [node for node in found.values() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
        annotations = {each.arg: each.annotation for each in (*method.args.args, *method.args.kwonlyargs)}
        for node in ast.walk(method):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for each in (one for target in targets if target is not None for one in ast.walk(target)):
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    value = getattr(node, "value", None)
                    told = annotations.get(value.id) if isinstance(value, ast.Name) else None
                    found.setdefault(each.attr, getattr(node, "annotation", None) or told or ast.Pass())
    return found


# What we use


@dataclass(frozen=True, order=True)
class Use:
    path: str
    where: str


@dataclass
class _Scope:
    """What local names stand for: paths into vLLM. `cls` is the class of ours that the code stands in."""

    names: dict[str, str] = field(default_factory=dict)
    cls: ast.ClassDef | None = None


class _File:
    """Finds what one of our files uses."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._tree = path, ast.parse(text)
        self._uses: set[Use] = set()
        self._classes = {node.name: node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)}
        self._own = {name for cls in self._classes.values() for name in self._defined(cls)}
        self._of_self: dict[tuple[str, str], str] = {}  # by class and attribute
        self._imported = self._imports()

    @cached_property
    def uses(self) -> frozenset[Use]:
        if self._imported:
            for _ in range(2):  # the second time with what the first one learned of attributes
                self._read(self._tree, _Scope(dict(self._imported)))
        for node in ast.walk(self._tree):
            if ENVIRONMENT.fullmatch(_text(node)):
                self._note(f"{VLLM}.envs.{_text(node)}", node)
        return frozenset(self._uses)

    def _note(self, path: str | None, node: ast.AST) -> None:
        if path is not None and ".sluice_" not in path:  # which we have put there
            self._uses.add(Use(path, f"{self._path}:{getattr(node, 'lineno', 0)}"))

    def _imports(self) -> dict[str, str]:
        """What is imported, by local name; without what is imported from one of two places."""
        found: dict[str, str] = {}
        either = [block for node in ast.walk(self._tree) if _tries_imports(node) for block in ast.walk(node)]
        for node in ast.walk(self._tree):
            for local, path in _imported(node):
                if node not in either:
                    found[local] = path if path.startswith(f"{VLLM}.") and isinstance(node, ast.ImportFrom) else VLLM
                    self._note(path, node)
        places: dict[str, list[str]] = {}
        for node in either:
            for local, path in _imported(node):
                places.setdefault(local, []).append(path)
        for paths in places.values():
            self._note(OR.join(paths), self._tree)
        return found

    @staticmethod
    def _defined(cls: ast.ClassDef) -> set[str]:
        """Not what is only annotated: that may be the base's."""
        annotated = {
            node.target.id
            for node in cls.body
            if isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Name)
        }
        is_data = any("dataclass" in ast.unparse(each) for each in cls.decorator_list)
        return set(_members(cls)) - (set() if is_data else annotated)

    def _base(self, cls: ast.ClassDef) -> str | None:
        """The class of vLLM that this one is derived from."""
        for base in map(ast.unparse, cls.bases):
            if base in self._imported:
                return self._imported[base]
            if base in self._classes and (found := self._base(self._classes[base])) is not None:
                return found
        return None

    def _above(self, cls: ast.ClassDef) -> set[str]:
        """Names that our own classes above this one define."""
        above = [self._classes[base] for base in map(ast.unparse, cls.bases) if base in self._classes]
        return {name for each in above for name in self._defined(each) | self._above(each)}

    def _read(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.ClassDef):
            scope = _Scope(dict(scope.names), node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            scope = _Scope(dict(scope.names), scope.cls)
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                self._set(scope, argument.arg, self._annotated(argument.annotation))
        elif isinstance(node, ast.comprehension | ast.For | ast.AsyncFor):
            for each in ast.walk(node.target):
                if isinstance(each, ast.Name):
                    self._set(scope, each.id, None)
        for child in ast.iter_child_nodes(node):
            self._read(child, scope)
        self._learn(node, scope)
        if isinstance(node, ast.Attribute):
            self._note(self._path_of(node, scope), node)
        elif isinstance(node, ast.Call) and (path := self._path_of(node.func, scope)) is not None:
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._note(f"{path}.{keyword.arg}=", node)

    def _learn(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.AnnAssign):
            targets: list[ast.expr] = [node.target]
            path = self._annotated(node.annotation)
        elif isinstance(node, ast.Assign):
            targets, path = node.targets, self._path_of(node.value, scope)
        else:
            return
        for target in targets:
            if isinstance(target, ast.Name):
                self._set(scope, target.id, path)
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and scope.cls and path:
                self._of_self[scope.cls.name, target.attr] = path

    @staticmethod
    def _set(scope: _Scope, name: str, path: str | None) -> None:
        scope.names.pop(name, None)
        if path is not None:
            scope.names[name] = path

    def _annotated(self, node: ast.expr | None) -> str | None:
        if isinstance(node, ast.BinOp):  # X | None
            node = node.left
        return self._imported.get(node.id) if isinstance(node, ast.Name) else None

    def _path_of(self, node: ast.expr, scope: _Scope) -> str | None:
        if isinstance(node, ast.Name):
            return scope.names.get(node.id)
        if isinstance(node, ast.Call):
            path = self._path_of(node.func, scope)
            return None if path is None else f"{path}.{CALL}"
        if not isinstance(node, ast.Attribute):
            return None
        if scope.cls is not None and (whose := ast.unparse(node.value)) in {"self", "super()"}:
            return self._of_object(scope.cls, node.attr, whose)
        path = self._path_of(node.value, scope)
        return None if path is None else f"{path}.{node.attr}"

    def _of_object(self, cls: ast.ClassDef, name: str, whose: str) -> str | None:
        if (known := self._of_self.get((cls.name, name))) is not None:
            return known
        base = self._base(cls)
        ours = self._own if whose == "self" else self._above(cls)
        return None if base is None or name in ours else f"{base}.{name}"


def _tries_imports(node: ast.AST) -> bool:
    kinds = [ast.unparse(each.type) for each in node.handlers if each.type] if isinstance(node, ast.Try) else []
    return bool({"ImportError", "ModuleNotFoundError"} & set(kinds))


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Of one statement: local names of what it imports from vLLM, with the paths."""
    if isinstance(node, ast.Import):
        found = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        found = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    else:
        return
    yield from ((local, path) for local, path in found if path.split(".")[0] == VLLM)


def used(files: Mapping[str, str]) -> set[Use]:
    """files: texts by their paths."""
    return {use for path, text in files.items() if VLLM in text.lower() for use in _File(path, text).uses}


def listed() -> Iterator[Use]:
    """What stands in `BESIDES`, and in strings of our code."""
    for cls, names in BESIDES.items():
        yield from (Use(f"{cls}.{name}", "tests/vllm_names.py") for name in names.split())
    for (path, variable), cls in IN_STRINGS.items():
        tree = ast.parse((ROOT / path).read_text())
        words = next(node.value for node in tree.body if isinstance(node, ast.Assign) and _assigns(node, variable))
        yield from (Use(f"{cls}.{name}", path) for name in ast.literal_eval(words))


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


@cache
def all_uses() -> set[Use]:
    paths = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    return used({str(path.relative_to(ROOT)): path.read_text() for path in paths}) | set(listed())


def gone(sources: Sources) -> list[str]:
    """Names that we use and this vLLM does not have, with a place where each is used."""
    places: dict[str, str] = {}
    for use in sorted(all_uses()):
        places.setdefault(use.path, use.where)
    return [f"{path} ({where})" for path, where in places.items() if not sources.has(path)]


def changed(sources: Sources, since: Sources) -> list[str]:
    """Functions that we call or override and that take other arguments than before."""
    found = {path: (since.arguments(path), sources.arguments(path)) for path in {use.path for use in all_uses()}}
    differing = sorted((path, *both) for path, both in found.items() if None not in both and both[0] != both[1])
    return [f"{path}\n    from ({old})\n    to   ({new})" for path, old, new in differing]


def main() -> None:
    sources = Sources.of_wheel(Path(sys.argv[1])) if len(sys.argv) > 1 else Sources.installed()
    missing = gone(sources)
    print("\n".join(missing) or f"all {len({use.path for use in all_uses()})} names are there")
    print(
        "\n".join(["", "Other arguments:", *different]) if (different := changed(sources, Sources.installed())) else ""
    )
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
