"""Random expressions for kernels: recipes of pointwise ops, reductions and views, and their values.

A recipe runs on any tensors: in the dtypes under test, and in float64 for the reference, where
casts between floating dtypes are left out. Ops that jump (comparisons, rounding, positions) read
inputs only: there float64 and the dtype under test see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F

ROWS, COLUMNS = 5, 13

#: Inputs: shape and dtype. The floating ones are made in each case's dtype.
INPUTS = {
    "x": (ROWS, COLUMNS),
    "y": (ROWS, COLUMNS),
    "turned": (COLUMNS, ROWS),
    "row": (COLUMNS,),
    "column": (ROWS, 1),
    "number": (),
}

UNARY = {
    "exp": lambda v: torch.exp(v.clamp(max=2.0)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": lambda v: torch.sqrt(torch.abs(v) + 0.5),
    "rsqrt": lambda v: torch.rsqrt(torch.abs(v) + 0.5),
    "log1p": lambda v: torch.log1p(torch.abs(v)),
    "erf": torch.erf,
    "sin": lambda v: torch.sin(v.clamp(-4, 4)),
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "square": lambda v: v.clamp(-4, 4) ** 2,
    "halve": lambda v: v / 2,
    "scale": lambda v: 0.3 * v + 1,
    "leaky": lambda v: F.leaky_relu(v, 0.1),
    "clamp": lambda v: v.clamp(-1.25, 0.75),
    "clone": torch.clone,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda a, b: a.clamp(-4, 4) * b.clamp(-4, 4),
    "div": lambda a, b: a / (torch.abs(b) + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "alpha": lambda a, b: torch.add(a, b, alpha=-0.5),
}
ROWWISE = {
    "sum": lambda v, d: v.sum(d, keepdim=True) / 4,
    "mean": lambda v, d: v.mean(d, keepdim=True),
    "amax": lambda v, d: v.amax(d, keepdim=True),
    "amin": lambda v, d: v.amin(d, keepdim=True),
    "var": lambda v, d: v.clamp(-4, 4).var(d, keepdim=True, correction=0),
    "softmax": lambda v, d: torch.softmax(v, d),
    "log_softmax": lambda v, d: torch.log_softmax(v, d),
    "layer_norm": lambda v, d: F.layer_norm(v, v.shape[-1:]),
    "rms": lambda v, d: v * torch.rsqrt(v.clamp(-4, 4).square().mean(d, keepdim=True) + 0.1),
    "all": lambda v, d: v.mean(),
}
VIEWS = {
    "t": lambda v: v.t() if v.dim() == 2 else v,
    "flat": lambda v: v.reshape(-1),
    "unsqueeze": lambda v: v.unsqueeze(-1) if v.dim() == 1 else v,
    "slice": lambda v: v[..., 1:] if v.dim() and v.shape[-1] > 2 else v,
    "double": lambda v: torch.stack([v, v]) if v.dim() == 1 else v.expand(v.shape),
}
CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
#: On inputs alone; the results are integers or booleans, or floats made of these.
JUMPS = {
    "mask": lambda a, b, k: torch.where(a > b, a, 0.5 * b),
    "equal": lambda a, b, k: (a == b).float(),
    "argmax": lambda a, b, k: a.argmax(-1) if a.dim() else a > 0,
    "max": lambda a, b, k: a.max(0).values + a.max(0).indices if a.dim() else a,
    "floor": lambda a, b, k: torch.floor(a) + torch.round(a),
    "divide": lambda a, b, k: k // 3 - k % 3 + torch.div(k, 4, rounding_mode="trunc"),
    "remainder": lambda a, b, k: torch.remainder(k, -3) + (k & 6) + (k > 2),
    "wrap": lambda a, b, k: k * 2_000_000_000,
    "int": lambda a, b, k: (3 * a).to(torch.int64) + k.sum(),
    "logical": lambda a, b, k: torch.logical_and(a > 0, k > 0).any(-1),
    "masked_fill": lambda a, b, k: a.masked_fill(k > 3, float("-inf")).amax(),
}

#: What to do, and two numbers that choose operands and dimensions.
Step = tuple[str, int, int]


@dataclass(frozen=True)
class Recipe:
    """Steps, and how many of the last results are returned."""

    dtype: torch.dtype
    steps: tuple[Step, ...]
    outputs: int
    integers: torch.dtype

    def inputs(self) -> dict[str, torch.Tensor]:
        made = {}
        for number, (name, shape) in enumerate(INPUTS.items()):
            generator = torch.Generator().manual_seed(number)
            made[name] = torch.randn(shape, generator=generator).to(self.dtype)
        generator = torch.Generator().manual_seed(99)
        made["k"] = torch.randint(-9, 9, (ROWS, COLUMNS), generator=generator).to(self.integers)
        return made

    def run(self, inputs: dict[str, torch.Tensor], exact: bool = False) -> tuple[Any, ...]:
        """The outputs; ``exact`` leaves casts to other floating dtypes out."""
        floats = [value for name, value in inputs.items() if name != "k"]
        values = list(floats)
        for name, first, second in self.steps:
            # The newest values first, so that steps build on one another.
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            made = self._step(name, a, b, first, second, floats, inputs["k"], exact)
            if made.is_floating_point():
                values.append(made)
            else:
                values.insert(0, made.to(torch.float64 if exact else torch.float32))
        return tuple(values[len(values) - self.outputs :])

    def _step(self, name, a, b, first, second, floats, k, exact):
        if name in UNARY:
            return UNARY[name](a)
        if name in BINARY:
            return BINARY[name](a, b) if _fit(a, b) else BINARY[name](a, a)
        if name in ROWWISE:
            return ROWWISE[name](a, second % a.dim() - a.dim()) if a.dim() else a.exp()
        if name in VIEWS:
            return VIEWS[name](a)
        if name in CASTS:
            return a.clone() if exact else a.to(CASTS[name])
        x, y = floats[first % 2], floats[second % 2]
        return JUMPS[name](x, y, k)


def _fit(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes broadcast, to no more than three dimensions."""
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


NAMES = (*UNARY, *BINARY, *ROWWISE, *VIEWS, *CASTS, *JUMPS)


@st.composite
def recipes(draw: Any) -> Recipe:
    """Recipes of up to ten steps."""
    step = st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.integers(0, 9))
    return Recipe(
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        steps=tuple(draw(st.lists(step, min_size=2, max_size=10))),
        outputs=draw(st.integers(1, 3)),
        integers=draw(st.sampled_from([torch.int32, torch.int64])),
    )
