"""All that can be seen of a call, what differs between two, and what a process is like."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from tests.support.small_programs import ROWS, WIDTH
from tests.support.surroundings import BACKWARDS, DRIVES, INPUTS, Case, Scene
from tests.support.values import rnd, strides

#: What is seen of a call, by name.
Seen = dict[str, Any]

#: How torch refuses a gradient of a compiled graph's gradient, which eager computes; of a graph
#: that writes to its inputs as well.
_REFUSES = ("does not currently support double backward", "is being used in an in-place operation")
#: What eager refuses for how it keeps tensors, which a compiled graph may do without.
_EAGERS_OWN = "Inference tensors cannot be saved for backward"


def observations(case: Case, wrap: Callable[[Any], Any], calls: int = 6) -> list[Seen]:
    """What is seen of each of so many calls of a case's program, as ``wrap`` makes it.

    Inputs are new ones in each call, weights are the same.
    """
    weights = [rnd(WIDTH, WIDTH, seed=11), rnd(WIDTH, seed=12), rnd(WIDTH, seed=13)]
    for weight in weights[:2]:
        weight.requires_grad_(case.training)
    function = wrap(case.program.__call__)
    scenes = [case.scenes[number % len(case.scenes)] for number in range(calls)]
    return [observe(scene, function, weights, seed) for seed, scene in enumerate(scenes)]


def observe(scene: Scene, call: Callable[..., Any], weights: list[Tensor], seed: int) -> Seen:
    """Make one call, and tell what can be seen of it."""
    seen: Seen = {}
    torch.manual_seed(seed)
    x, leaves = INPUTS[scene.input](rnd(ROWS, WIDTH, seed=seed))
    leaves = leaves + [weight for weight in weights if weight.requires_grad]
    given = [x, *weights]
    versions = [_version(value) for value in given]
    for leaf in leaves:
        leaf.grad = None
    results: list[Any] = []
    try:
        with scene.entered(scene.around) as modes:
            found = DRIVES[scene.drive](lambda t: call(t, *weights), x)
            results = list(found) if isinstance(found, tuple | list) else [found]
            seen |= {f"result {i}": _facts(result) for i, result in enumerate(results)}
            counted = zip(scene.around, modes, strict=True)
            seen |= {f"calls of {n}": m.count for n, m in counted if n in ("functions", "ops")}
            if scene.inside:
                seen |= _backward(scene, results, leaves)
        if not scene.inside:
            seen |= _backward(scene, results, leaves)
    except Exception as error:  # held against eager's
        seen["raises"] = error
    for i, (value, version) in enumerate(zip(given, versions, strict=True)):
        seen[f"input {i}"] = _facts(value)
        seen[f"input {i} was written to"] = version != _version(value)
    seen |= {f"grad {i}": _facts(leaf.grad) for i, leaf in enumerate(leaves)}
    grads = [leaf.grad for leaf in leaves]
    seen["aliases"] = _aliases({"input": given, "result": results, "grad": grads})
    if "raises" not in seen:  # where a call ends halfway, nobody says what it has drawn
        seen["random numbers"] = _facts(torch.rand(2))
    return seen


def _backward(scene: Scene, results: list[Any], leaves: list[Tensor]) -> Seen:
    tensors = [result for result in results if isinstance(result, Tensor)]
    if not scene.backward or not leaves or not any(tensor.requires_grad for tensor in tensors):
        return {}
    try:
        with scene.entered(scene.around_backward):
            found = BACKWARDS[scene.backward](tensors, leaves)
    except Exception as error:  # held against eager's
        return {"backward raises": error}
    return {f"gradient {i}": _facts(gradient) for i, gradient in enumerate(found or ())}


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _facts(value: Any) -> Any:
    """What is compared of a result, with its values as they are now."""
    if not isinstance(value, Tensor):
        return value
    return {
        "type": type(value).__name__,
        "dtype": value.dtype,
        "device": value.device,
        "shape": tuple(value.shape),
        "strides": strides(value),
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "is_inference": value.is_inference(),
        "values": None if value.is_meta else value.detach().clone(),
    }


def _aliases(values: dict[str, list[Any]]) -> set[tuple[str, str]]:
    """Pairs of names of tensors that are one object, or share memory."""
    named = [(f"{kind} {i}", v) for kind, found in values.items() for i, v in enumerate(found)]
    named = [(name, value) for name, value in named if isinstance(value, Tensor) and value.numel()]
    pairs = [(a, b) for number, a in enumerate(named) for b in named[number + 1 :]]
    same = {(n, f"is {m}") for (n, a), (m, b) in pairs if a is b}
    return same | {(n, m) for (n, a), (m, b) in pairs if _storage(a) == _storage(b)}


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


# --- what differs ---------------------------------------------------------------------------------


def differences(case: Case, got: list[Seen], want: list[Seen]) -> list[dict[str, str]]:
    """What differs in each call, by name."""
    return [_different(case, one, eagers) for one, eagers in zip(got, want, strict=True)]


def _different(case: Case, got: Seen, want: Seen) -> dict[str, str]:
    if _EAGERS_OWN in str(want.get("raises", "")):
        return {}
    found = {}
    refused = any(how in str(got.get("backward raises", "")) for how in _REFUSES)
    for name in dict.fromkeys([*want, *got]):
        if refused and name.startswith(("grad", "backward", "aliases")):
            continue
        if name not in got or name not in want:
            whose = "it has no" if name in want else "eager has no"
            found[name] = f"{whose} {_short(got.get(name, want.get(name)))}"
        elif problem := _difference(got[name], want[name], case.rounds_to_bfloat16):
            found[name] = problem
    return found


def _short(value: Any) -> str:
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else str(value)
    return " ".join(text.split())[:300]


def _difference(got: Any, want: Any, loosely: bool) -> str:
    if isinstance(got, Exception) and isinstance(want, Exception):
        return ""  # Dynamo has types and messages of its own
    if not isinstance(got, dict) or not isinstance(want, dict):
        same = type(got) is type(want) and got == want
        return "" if same else f"{_short(got)} instead of {_short(want)}"
    for key, value in want.items():
        if key != "values" and got[key] != value:
            return f"{key} {got[key]} instead of {value}"
    if want["values"] is None or want["values"].numel() == 0:
        return ""
    a, b = got["values"].double(), want["values"].double()
    # Float32 sums of a few numbers in another order, in units of the largest; eight bits.
    share = 5e-2 if loosely else 1e-4
    largest = float(b.abs().nan_to_num(0, 0, 0).max())
    if torch.allclose(a, b, rtol=0, atol=share * (largest + 0.1), equal_nan=True):
        return ""
    return f"{a.flatten()[:4].tolist()} instead of {b.flatten()[:4].tolist()}"


# --- what a process is like -----------------------------------------------------------------------


def state() -> dict[str, Any]:
    """What torch and Python let one read of a process's state."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast dtypes": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill memory": torch.utils.deterministic.fill_uninitialized_memory,
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "function modes are on": torch._C._is_torch_function_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "functorch's levels": len(torch._C._functorch.get_interpreter_stack() or ()),
        "forward AD's level": forward_ad._current_level,
        "forward AD is on": forward_ad._is_fwd_grad_enabled(),
        "anomalies": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "saved tensors' hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "autograd's threads": torch.autograd.is_multithreading_enabled(),
        "warnings": len(warnings.filters),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "Python's generator": random.getstate(),
        "numpy's generator": str(numpy.random.get_state()),
    }


def broken() -> dict[str, str]:
    """What plain eager no longer does, and how it fails."""
    x = torch.tensor([1.0, 2.0])

    def tangent() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, x).sin()).tangent

    checks: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "hessian": (lambda: func.hessian(lambda t: (t**3).sum())(x), torch.diag(6 * x)),
        "jvp": (lambda: func.jvp(torch.sin, (x,), (x,))[1], x * x.cos()),
        "dual_level": (tangent, x * x.cos()),
        "vmap": (lambda: func.vmap(torch.sum)(x[:, None]), x),
        "grad": (lambda: func.grad(lambda t: t.square().sum())(x), 2 * x),
        "a product": (lambda: x[None] @ x[:, None], torch.tensor([[5.0]])),
    }
    found = {}
    for name, (run, want) in checks.items():
        try:
            torch.testing.assert_close(run(), want)
        except Exception as error:  # told
            found[name] = _short(error)
    return found


_left: list[Any] = []


def mend() -> None:
    """Close what a failing test left open, so that it alone fails."""
    torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    with contextlib.suppress(RuntimeError):  # none is open
        torch._C._exit_dual_level(level=0)
    forward_ad._current_level = -1
    if torch.is_inference_mode_enabled():
        _left.append(torch.inference_mode(False))
        _left[-1].__enter__()  # whoever entered it holds what would leave it
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
