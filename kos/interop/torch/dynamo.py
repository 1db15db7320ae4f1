"""torch.compile over kos: process groups and their Works run eagerly, and dynamo does not trace into them."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch

_PRIVATE = "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"
_TRACED = "getGroupName", "getBackendName"  # torch 2.11 reads these names within functional collectives


def disable(*modules: ModuleType) -> None:
    """Disable dynamo for the methods of all classes of the modules, as ``torch.compiler.disable`` does.

    That function imports dynamo, which takes seconds, and wraps each method, which slows eager calls.  This sets only
    what dynamo checks.  It reads the attribute before it inlines a call.  The strategy of a code object makes it skip
    the frame of the method and all frames below.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)  # not part of torch's API
    action, strategy, set_strategy = (getattr(frames, name, None) for name in _PRIVATE)
    classes = [(x, module) for module in modules for x in vars(module).values() if inspect.isclass(x)]
    ours = [each for each, module in classes if each.__module__ == module.__name__]
    for method in [x for each in ours for x in vars(each).values() if inspect.isfunction(x)]:
        if method.__name__ not in _TRACED:
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            if action and strategy and set_strategy:  # else frames below a method may be compiled for nothing
                set_strategy(method.__code__, strategy(action.SKIP, action.SKIP))
