# SPDX-License-Identifier: Apache-2.0
"""What other code has changed in a backbone of Transformers: forwards, classes, hooks, attention functions.

The tests and proofs of a family hold for the code that they ran. A Snapshot says in a fraction of a millisecond whether a
backbone still has the code that was looked at last, and names what is not the libraries' own, with what follows from it (Role).
"""

import enum
import functools
import inspect
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as module_globals
from transformers import masking_utils, modeling_utils

from ..errors import Unsupported
from . import deepspeed
from .code_digest import names_in
from .config_view import original_of
from .origin import home_of, is_library_code, stock_of, text_of

# Libraries whose hooks and forwards on single modules pass on what they are called with: they gather, move, cast or record.
_WRAPPERS = ("accelerate.", "deepspeed.", "espalier.", "peft.", "torch.distributed.", "torch.nn.utils.", "torch._dynamo.",
             "torch.utils.checkpoint", "transformers.", "trl.")  # fmt: skip
# Libraries whose functions stand in for those of Transformers' modules; the patch has its own in their place.
_KERNELS = ("causal_conv1d", "espalier", "fla", "kernels", "mamba_ssm")
_ACROSS = re.compile("enc|cross", re.IGNORECASE)  # attention to an encoder, which there is none of
# Modules of PyTorch that take one token at a time, or hold others.
_TOKENWISE = {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Identity", "Dropout", "SiLU", "GELU", "ReLU", "Tanh", "Sigmoid",
              "Softplus", "LeakyReLU", "ELU", "Mish", "ReLU6", "Hardswish", "ModuleList", "ModuleDict", "Sequential",
              "ParameterList", "ParameterDict"}  # fmt: skip
_PLAIN = (bool, int, float, str, FunctionType)
_CHECKPOINTING = "_gradient_checkpointing_func"  # which families.py judges
_CALLS = ("__call__", "_call_impl")  # of nn.Module, around every forward
_CALLED = ("forward", "__call__")
NUMBERS = ("layer_idx", "layer_id")  # attributes with the number of a layer
_SETTINGS = ("sliding_window", "is_causal", "scale_grad_by_freq", "max_norm")  # of modules, on which results for rows depend
_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")  # of a backbone, which runs as many as its config says
_MIXING = re.compile(r"Attention|Attn|Mixer|Mamba|DeltaNet|Conv|Recurrent|SSM|Rwkv|Retention|Indexer")
_CURE_OF_ATTENTION = "undo that, load the model with an attn_implementation of Transformers, or train it unpatched"
# Of libraries that leave no choice: the first letters of their modules -> what to do. Others can be left out by an option.
_CURES = {"unsloth": "Unsloth replaces attention and layers where it finds a GPU, and has no option that leaves them: load the "
                     "model by Transformers, with PEFT for adapters, in a process that does not import unsloth, or train it "
                     "unpatched"}  # fmt: skip
_PLACE_OF_MIXING = re.compile(r"(?:^|[._])(?:attn|attention|mixer|mamba|ssm)$")  # paths of such modules


_Code: TypeAlias = tuple[Mapping[str, Any], str, Any]  # where a function is looked up, its name, and the function
_Found: TypeAlias = dict[tuple[int, str], _Code]


class Role(enum.Enum):
    """What a change may do to the result, and so what decides whether tokens may be shared."""

    ROWS = "rows"  # it may look at the rows of a batch: such batches run unshared
    TOKENS = "tokens"  # the module took one token at a time before (tokenwise.py tests whether it does)
    PATHS = "paths"  # the module mixes tokens (a proof of the family with this code decides)
    ATTENTION = "attention"  # the patch has another function in its place: refused


@dataclass(frozen=True)
class Change:
    """One change. path: of the module in its backbone, "" for the backbone itself and for functions; what: for messages."""

    path: str
    what: str
    role: Role
    module: Any = None

    def __str__(self) -> str:
        return f"{self.what} in {self.path}" if self.path else self.what


def cure_of(change: Change, otherwise: str = "train this model unpatched") -> str:
    """What a user can do about a change, the end of a refusal. Its text names the module that the code is from."""
    return next((cure for prefix, cure in _CURES.items() if re.search(rf"[( ]{prefix}\w*[.) ]", f"{change} ")), otherwise)


class Snapshot:
    """The code of a backbone, or of a head, at one moment, and what other libraries have changed in it: `changes`. `code` has all
    functions that the module calls by class or module."""

    def __init__(self, module: Any, *classes: Any) -> None:
        """classes: of other modules that belong to it."""
        self._places = [(number, name) for number, part in enumerate(_modules_of(module)) for name in _SETTINGS
                        if name in vars(part)]  # fmt: skip
        self._state, self._classes = _state_of(module, self._places), classes
        every_class = self._state[0].union(classes)
        attention = _attention_functions(module) if hasattr(module, "config") else []
        self.code = attention + functions_of_classes(every_class)
        self._sizes = [(base, len(vars(base))) for base in _bases_of(every_class)]
        self.changes = [*_changed_attention(module, attention), *_changed_functions(self.code[len(attention):])]
        faults = {cls: fault for cls in every_class if (fault := _fault_of_class(cls)) is not None}
        self.changes += [Change("", faults[cls], Role.PATHS) for cls in classes if cls in faults]
        home = vars(sys.modules[_home_of(classes[0] if classes else type(module))])
        for path, part in module.named_modules():
            fault = faults.get(type(part)) or _foreign_place(home, path, part)
            self.changes += _changes_of_module(module, path, part, fault)
        for hook in _global_hooks():
            if not is_hook_of_wrapper(hook):
                self.changes.append(Change("", f"a hook on all modules, {_described(hook)},", Role.ROWS))
        for name in _CALLS:
            if not is_library_code(vars(nn.Module)[name]):
                self.changes.append(Change("", f"nn.Module.{name} from {_described(vars(nn.Module)[name])}", Role.ROWS))
        self.code += [(vars(nn.Module), name, vars(nn.Module)[name]) for name in _CALLS]
        self._watched = [part for change in self.changes if not type(change.module).__module__.startswith("peft.")
                         for part in (change.module.modules() if change.module is not None else ())]  # fmt: skip
        self._watched += [part for part in module.modules()
                          if any(isinstance(value, FunctionType) for value in vars(part).values())]  # fmt: skip
        self._settings = settings_of(self._watched)

    def is_current(self, module: Any, *classes: Any) -> bool:
        """Whether nothing has changed since."""
        return (classes == self._classes and self._state == _state_of(module, self._places)
                and all(where.get(name) is value for where, name, value in self.code)
                and all(len(base.__dict__) == size for base, size in self._sizes)
                and self._settings == settings_of(self._watched))  # fmt: skip

    def of_role(self, role: Role) -> list[Change]:
        return [change for change in self.changes if change.role is role]


def _modules_of(backbone: Any) -> list[Any]:
    """All modules, in an order that is the same as long as the backbone is; in less time than by backbone.modules()."""
    modules = [backbone]
    for module in modules:  # which grows
        if children := module.__dict__["_modules"]:
            modules += [child for child in children.values() if child is not None]
    return modules


def _state_of(backbone: Any, places: Sequence[tuple[int, str]]) -> tuple[Any, ...]:
    """What can change without a function of a class or a module changing. It does not keep the modules alive. places: of the
    settings to read: (number of the module, name)."""
    modules = _modules_of(backbone)
    values = [module.__dict__ for module in modules]
    marked = [(id(module), own.get("_active_adapter"), own.get("_disable_adapters"),
               None if module is backbone else own.get("forward"), *hooks_of(module))
              for module, own in zip(modules, values)
              if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
              or "forward" in own or "_active_adapter" in own]  # fmt: skip
    config = original_of(backbone.__dict__.get("config"))
    settings = [getattr(config, name, None) for name in ("_attn_implementation", "is_causal", "num_hidden_layers")]
    settings += getattr(config, "layer_types", None) or []
    settings += [values[number].get(name) for number, name in places if number < len(values)]
    in_training = sum(map(operator.itemgetter("training"), values))
    return set(map(type, modules)), marked, list(map(len, values)), in_training, settings, _global_hooks()


def settings_of(modules: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Plain attributes and functions of modules, and of their classes where these are of other code."""
    found = []
    for module in modules:
        own = [base for base in _bases_of({type(module)}) if not base.__module__.startswith(("torch.", "transformers."))]
        for values in (vars(module), *map(vars, own)):
            found.append(tuple((name, value) for name, value in values.items() if isinstance(value, _PLAIN)))
    return found


def hooks_of(module: Any) -> tuple[Any, ...]:
    """The hooks of a module, of forward and backward passes."""
    values = module.__dict__
    return (*values["_forward_hooks"].values(), *values["_forward_pre_hooks"].values(), *values["_backward_hooks"].values(),
            *values["_backward_pre_hooks"].values())  # fmt: skip


def _global_hooks() -> tuple[Any, ...]:
    """Hooks on all modules of the process."""
    if not module_globals._has_any_global_hook():
        return ()
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
    return tuple(hook for name in names for hook in getattr(module_globals, name).values())


def _bases_of(classes: set[Any]) -> list[Any]:
    """The classes themselves and those that they derive from, up to nn.Module."""
    found: dict[Any, None] = {}
    for cls in classes:
        for base in cls.__mro__:
            if base is nn.Module:
                break
            found[base] = None
    return list(found)


def functions_of_classes(classes: set[Any]) -> list[_Code]:
    """Methods of the classes, and functions of modules that these call."""
    found: _Found = {}
    for base in _bases_of(classes):
        is_general = base.__module__.startswith(("torch.", "transformers.")) and ".models." not in base.__module__
        for name, value in vars(base).items():
            is_called = name in _CALLED
            if not is_called and (is_general or not isinstance(value, FunctionType)):
                continue
            found[id(base), name] = vars(base), name, value
            for link in _links(value):
                _add_globals(found, link)
    return list(found.values())


def _add_globals(found: _Found, function: FunctionType) -> None:
    scope, functional = function.__globals__, vars(nn.functional)
    home = str(scope.get("__name__"))
    for name in names_in(function.__code__) & functional.keys():
        if callable(functional[name]) and not isinstance(functional[name], type | ModuleType):
            found[id(functional), name] = functional, name, functional[name]
    if not home.startswith("transformers.") and is_library_code(function):
        return
    for name in names_in(function.__code__):
        value = scope.get(name)
        if callable(value) and not isinstance(value, type | ModuleType) and (id(scope), name) not in found:
            found[id(scope), name] = scope, name, value
            for link in _links(value):
                _add_globals(found, link)


def _links(function: Any) -> Iterator[FunctionType]:
    """A function and those that it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function
        function = getattr(function, "__wrapped__", None)


def _attention_functions(backbone: Any) -> list[_Code]:
    """What the unpatched backbone calls for attention and masks, where they are looked up."""
    name = original_of(backbone.config)._attn_implementation
    home = vars(sys.modules[_home_of(type(backbone))])
    attention = home.get("ALL_ATTENTION_FUNCTIONS", modeling_utils.ALL_ATTENTION_FUNCTIONS)
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    tables = [table for owner in (attention, masks) for table in (owner._local_mapping, owner._global_mapping)]
    found = {(id(table), name): (table, name, table.get(name)) for table in tables}
    for _, _, function in list(found.values()):
        for link in _links(function.func if isinstance(function, functools.partial) else function):
            _add_globals(found, link)
    return list(found.values())


def _home_of(cls: Any) -> str:
    """The module of Transformers that a class comes from."""
    found = (base.__module__ for base in cls.__mro__ if base.__module__.startswith("transformers.models."))
    return next(found, "transformers")


def _changed_attention(backbone: Any, attention: list[_Code]) -> Iterator[Change]:
    for path, window, expected in _changed_windows(backbone):
        yield Change(path, f"sliding_window={window}, where masks are made for {expected},", Role.ATTENTION)
    if getattr(backbone.__dict__.get("config"), "is_causal", True) is False:
        yield Change("", "is_causal=False of the config", Role.ATTENTION)
    for scope, key, function in attention:
        target = function.func if isinstance(function, functools.partial) else function
        is_in_module = "__name__" in scope
        if function is None or _is_library_function(target) or (is_in_module and _is_imported(scope, key, function)):
            continue
        if not isinstance(function, nn.Module):
            what = f"{scope['__name__']}.{key}" if is_in_module else f"the attention function {key!r}"
            yield Change("", f"{what} from {_described(function)}", Role.ATTENTION)


def _changed_windows(backbone: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, window, that of its masks) of modules whose window is not the one for which Transformers makes masks, by the kinds
    of layers in the config."""
    config = backbone.__dict__.get("config")
    types = getattr(config, "layer_types", None)
    declared = getattr(config, "sliding_window", None)
    if not types or not isinstance(declared, int | None):
        return
    for path, module in backbone.named_modules():
        layer = _LAYER.match(path)
        is_by_window = "sliding_window" in vars(module) and not hasattr(module, "is_sliding")
        if layer is None or not is_by_window or int(layer[1]) >= len(types):
            continue
        expected = declared if types[int(layer[1])] == "sliding_attention" else None
        if isinstance(module.sliding_window, int | None) and (module.sliding_window or None) != (expected or None):
            yield path, module.sliding_window, expected


def _changed_functions(code: list[_Code]) -> Iterator[Change]:
    """Functions of modules of Transformers that others have replaced."""
    for scope, name, function in code:
        if not isinstance(scope, dict) or _is_library_function(function) or _is_imported(scope, name, function):
            continue
        is_attention = "mask" in name or name == "eager_attention_forward"
        what = f"{scope['__name__']}.{name} from {_described(function)}"
        yield Change("", what, Role.ATTENTION if is_attention else Role.PATHS)


def _is_imported(scope: Mapping[str, Any], name: str, function: Any) -> bool:
    """Whether a function is of the package of the module, or its file imports from that package, or sets the name itself when it
    is needed, as those of kernels from the Hub."""
    if _package_of(stock_of(function)) == str(scope["__name__"]).partition(".")[0]:
        return True
    package = re.escape(_package_of(stock_of(function)))
    pattern = rf"^\s*(from|import) {package}\b|^\s*global\b.*\b{name}\b"
    return bool(re.search(pattern, text_of(str(scope["__name__"])) or "", flags=re.MULTILINE))


def _is_library_function(function: Any) -> bool:
    if isinstance(function, FunctionType | MethodType | BuiltinFunctionType | functools._lru_cache_wrapper):
        function = stock_of(function)
        return is_library_code(function) or _package_of(function) in _KERNELS or deepspeed.is_linear(function)
    return str(type(function).__module__).partition(".")[0] in ("torch", "transformers", *_KERNELS)


def _package_of(function: Any) -> str:
    return home_of(function).partition(".")[0]


def _fault_of_class(cls: Any) -> str | None:
    """What of a class is not that of its library, None where all is."""
    home = cls.__module__.partition(".")[0]
    if home not in ("torch", "transformers"):
        return f"the class {cls.__name__} from {cls.__module__}"
    for base in _bases_of({cls}):
        is_ours = base.__module__.startswith("transformers.models.")
        if base.__module__.partition(".")[0] not in ("torch", "transformers"):
            return f"the class {base.__name__} from {base.__module__}"
        for name, value in vars(base).items():
            is_called = name in _CALLED or (is_ours and isinstance(value, FunctionType))
            if is_called and not _is_own(base, name, value):
                return f"{base.__name__}.{name} from {_described(value)}"
    return None


def _foreign_place(home: Mapping[str, Any], path: str, module: Any) -> str | None:
    """Whether a module of PyTorch or Transformers is one that models of the module `home` do not have, such as a softmax over
    tokens; None where it is."""
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules."):
        is_known = cls.__name__ in _TOKENWISE or (cls is nn.Conv1d and "conv" in path.rpartition(".")[2])
    else:
        is_known = not cls.__module__.startswith("transformers.") or any(
            home.get(base.__name__) is base or base.__module__ == "transformers.activations" for base in cls.__mro__)  # fmt: skip
    return None if is_known else f"the class {cls.__name__} from {cls.__module__}"


def _is_own(base: Any, name: str, function: Any) -> bool:
    """Whether a method is the one with which its class was made."""
    function = stock_of(function)
    if not isinstance(function, FunctionType) or not is_library_code(function):
        return False
    innermost = list(_links(function))[-1].__code__
    return name != "forward" or innermost.co_qualname == f"{base.__qualname__}.forward" or base.__module__.startswith("torch.")


def _changes_of_module(backbone: Any, path: str, module: Any, fault: str | None) -> Iterator[Change]:
    role = Role.PATHS if mixes(module) or _stands_in_for_mixing(path, module) else Role.TOKENS
    if ".parametrizations." in f".{path}.":  # of weights, not of tokens
        return
    if fault is not None:
        yield Change(path, fault, role, module)
    forward = _forward_on(backbone, module)
    if forward is not None:
        yield Change(path, f"a forward from {_described(forward)}", role, module)
    for name, value in vars(module).items():
        if name not in ("forward", _CHECKPOINTING) and isinstance(value, FunctionType | MethodType) and not _is_passing(value):
            yield Change(path, f"{name} from {_described(value)}", role, module)
    if getattr(module, "is_causal", True) is False and "is_causal = True" in _source_of(type(module)):
        yield Change(path, "is_causal=False", Role.ATTENTION, module)
    for name in ("scale_grad_by_freq", "max_norm") if isinstance(module, nn.Embedding) else ():
        if value := getattr(module, name):  # both look at all tokens of a batch, with padding
            yield Change(path, f"{name}={value}", Role.ROWS, module)
    for hook in () if module is backbone else hooks_of(module):
        if not is_hook_of_wrapper(hook):
            yield Change(path, f"a hook, {_described(hook)},", Role.ROWS, module)


def mixes(module: Any) -> bool:
    """Whether a module, or one in it, mixes tokens in Transformers."""
    return any(_MIXING.search(base.__name__) for part in module.modules() for base in type(part).__mro__
               if base.__module__.startswith("transformers."))  # fmt: skip


def _stands_in_for_mixing(path: str, module: Any) -> bool:
    """Whether a module of another library is where modules of Transformers mix tokens."""
    is_known = type(module).__module__.startswith(("torch.", "transformers.", "peft."))
    return not is_known and _PLACE_OF_MIXING.search(path) is not None


def _forward_on(backbone: Any, module: Any) -> Any:
    """The forward that others have set on a module itself; None where there is none, or one that passes on its input."""
    forward = module.__dict__.get("forward")
    if module is backbone and (patch := module.__dict__.get("_espalier")) is not None:
        forward = patch.stock_forward
    if forward is not None and "_hf_hook" in vars(module):  # Accelerate's, around the former one
        forward = vars(module).get("_old_forward")
    return None if forward is None or _is_passing(forward, type(module).forward) else forward


def _is_passing(function: Any, stock: Any = None) -> bool:
    """Whether it is `stock`, or code of libraries that wrap modules, all the way down."""
    while True:
        function = getattr(function, "_torchdynamo_orig_callable", function)
        inner = getattr(function, "__func__", function)
        if inner is stock:
            return True
        if not is_hook_of_wrapper(inner) and not is_library_code(inner):
            return False
        function = getattr(inner, "__wrapped__", None)
        if function is None:  # the forward of another class of Transformers is a replacement
            scope = getattr(inner, "__globals__", {})
            return stock is None or not str(scope.get("__name__")).startswith("transformers.models.")


def is_hook_of_wrapper(hook: Any) -> bool:
    """Whether it is code of a library that passes on what it is called with. What carries data, such as an adapter for each
    row, does more, but for DeepSpeed's lists of parameters."""
    if isinstance(hook, functools.partial):
        return False
    function = getattr(hook, "__func__", hook)
    if isinstance(function, FunctionType):
        kept = () if home_of(function).startswith("deepspeed.") else inspect.getclosurevars(function).nonlocals.values()
        if any(isinstance(value, torch.Tensor | list | tuple) for value in kept):
            return False
        names = [str(link.__globals__.get("__name__")) for link in _links(function)]
    else:
        names = [str(type(function).__module__)]
    return all((name + ".").startswith(_WRAPPERS) for name in names)


def _described(function: Any) -> str:
    """The name of a function and where it is from."""
    function = function.func if isinstance(function, functools.partial) else function
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):  # decorators copy names and modules, not code
        return f"{function.__code__.co_qualname} ({function.__globals__.get('__name__')})"
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} ({type(function).__module__})"


def _source_of(cls: Any) -> str:
    """The source of a class of Transformers and of those that it derives from there, as it is on disk."""
    return "\n".join(_segments(base.__module__).get(base.__name__, "") for base in cls.__mro__
                     if base.__module__.startswith("transformers.models."))  # fmt: skip


@functools.cache
def _segments(module: str) -> dict[str, str]:
    """The source of each class of a module."""
    pieces = re.split(r"^class ", text_of(module) or "", flags=re.MULTILINE)[1:]
    return {piece.partition("(")[0].partition(":")[0].strip(): piece for piece in pieces}


def attention_modules(backbone: Any) -> dict[int, str]:
    """Modules of a backbone whose class in Transformers, or the one there whose name it has, calls an attention function by its
    name: id -> path."""
    home = _segments(_home_of(type(backbone)))
    attending = {cls for cls in set(map(type, backbone.modules()))
                 if "ALL_ATTENTION_FUNCTIONS" in (_source_of(cls) or home.get(cls.__name__, ""))}  # fmt: skip
    count = getattr(backbone.config, "num_hidden_layers", None)

    def is_called(path: str) -> bool:
        layer = _LAYER.match(path)
        is_skipped = layer is not None and isinstance(count, int) and int(layer[1]) >= count
        return not is_skipped and not _ACROSS.search(path.rpartition(".")[2])

    return {id(module): path for path, module in backbone.named_modules() if type(module) in attending and is_called(path)}


def refuse_attention(snapshot: Snapshot) -> None:
    """Raises Unsupported where the unpatched model computes attention or masks by functions that the patch does not know."""
    for change in snapshot.of_role(Role.ATTENTION):
        raise Unsupported(f"espalier.hf.patch: expected attention and masks of Transformers, which the patch computes in "
                          f"another way, received {change}; {cure_of(change, _CURE_OF_ATTENTION)}")  # fmt: skip


def functions_of(snapshot: Snapshot) -> list[tuple[str, Any]]:
    """(name, function) of the code that decides what a backbone computes, by classes, modules and single objects."""
    found = [(name, stock_of(function)) for _, name, function in snapshot.code
             if isinstance(function, FunctionType | functools.partial | MethodType)]  # fmt: skip
    for change in snapshot.of_role(Role.PATHS):
        if change.module is not None:
            found += [(f"{place_of(change.path)}.{name}", getattr(value, "__func__", value))
                      for name, value in _own_functions(change.module)]  # fmt: skip
            found.append((f"{change.path}.", tuple(settings_of([change.module]))))
    return [(name, function) for name, function in found if not str(getattr(function, "__module__", "")).startswith("torch.")]


def place_of(path: str) -> str:
    """A path with * for numbers: the same in all layers."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def _own_functions(module: Any) -> list[tuple[str, Any]]:
    """Functions that others have set on a module itself."""
    stock = type(module).forward
    return [(name, value) for name, value in vars(module).items()
            if (isinstance(value, FunctionType | MethodType) or name == "forward") and name != _CHECKPOINTING
            and not _is_passing(value, stock)]  # fmt: skip


def _settings_but_numbers(module: Any) -> list[Any]:
    """The settings of a module, but for the number of its layer."""
    return [pair for pairs in settings_of([module]) for pair in pairs if pair[0] not in NUMBERS]


class NotCarriedOver(Exception):
    """A change that a small copy cannot have; the message says why."""


def carry_over(changes: Sequence[Change], model: Any) -> None:
    """Gives a small copy of a backbone the changes of single objects in the backbone, at the same places of all layers. Raises
    NotCarriedOver where that is not possible."""
    places: dict[str, Change] = {}
    for each in changes:
        if each.module is not None:
            other = places.setdefault(place_of(each.path), each)
            if _settings_but_numbers(each.module) != _settings_but_numbers(other.module):
                raise NotCarriedOver(f"{each} has other settings than {other}")
    for path, module in list(model.named_modules()):
        change = places.get(place_of(path))
        if change is None:
            continue
        cls, own = type(change.module), type(module)
        if cls is not own:
            if not issubclass(cls, own):
                raise NotCarriedOver(f"{change} is no {own.__name__}")
            module.__class__ = cls
            for name, value in vars(change.module).items():
                if isinstance(value, _PLAIN) and name not in vars(module):
                    setattr(module, name, value)
        for name, value in _own_functions(change.module):
            if isinstance(value, MethodType) and value.__self__ is change.module:
                setattr(module, name, MethodType(value.__func__, module))
            else:
                raise NotCarriedOver(f"{change} is no method of its module")
