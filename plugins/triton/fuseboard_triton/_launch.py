"""Kernels to call: source becomes a module, a call makes the outputs and launches."""

from __future__ import annotations

import getpass
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fuseboard_triton import _autotune
from fuseboard_triton._autotune import Config
from fuseboard_triton._codegen import KernelSource
from fuseboard_triton._ir import Value
from fuseboard_triton._math import INTERPRETING, NAMES
from fuseboard_triton._torch_internals import Size, python_source

_HEAD = f"""import triton
import triton.language as tl
from fuseboard_triton._math import (
    floor_divide_int,
    max_rows,
    min_rows,
    narrow,
    remainder_int,
{"".join(f"    {name},{chr(10)}" for name in NAMES)})


"""

#: Source → the function of it: layers that compute the same share code and tuning.
_functions: dict[str, Any] = {}
#: What was tuned: kernel, device and sizes → the fastest.
_tuned: dict[Any, Config] = {}

#: Indices up to this fit into 32 bits, those that a last block leaves unused included.
NARROW = 2**31 - 2**17


def function_of(source: str) -> Any:
    """The ``@triton.jit`` function that a source defines.

    Triton reads a function's source from its file, so there is one; its name is the source's hash.
    """
    if source not in _functions:
        text = _HEAD + source
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        path = _directory() / f"kernel_{digest}.py"
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            unfinished.write_text(text)
            unfinished.replace(path)
        spec = importlib.util.spec_from_file_location(f"fuseboard_triton_{digest}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = re.search(r"^def (\w+)\(", source, re.MULTILINE)
        assert found is not None
        _functions[source] = getattr(module, found.group(1))
    return _functions[source]


def _directory() -> Path:
    """Where the modules lie: a directory that nobody else can write to."""
    path = Path(tempfile.gettempdir()) / f"fuseboard_triton_{getpass.getuser()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


class Launcher:
    """One kernel of a region: takes its tensors and the region's symbols, returns its outputs."""

    def __init__(
        self,
        source: KernelSource,
        symbols: Sequence[Any],
        layout: Callable[[Value], tuple[Sequence[Size], Sequence[Size]]],
        device: torch.device,
        autotune: bool,
    ) -> None:
        """
        :param symbols: those whose numbers follow the tensors in a call.
        :param layout: the sizes and strides of what is read or made.
        """
        self.__name__ = source.name
        self.__module__ = "triton"
        self.source = source
        self.device = device
        self.autotune = autotune
        self._count = len(source.inputs)
        self._outputs = [(*layout(value), value.dtype) for value in source.outputs]
        names = {symbol: f"s{number}" for number, symbol in enumerate(symbols)}
        self._numbers = _evaluator(self._sizes(), names)
        self._layouts = _evaluator(tuple(layout(value) for value in source.inputs), names)
        self._checked = False

    def _sizes(self) -> tuple[Any, ...]:
        """Everything that a call has to know, as one nested tuple of sizes."""
        source = self.source
        return (
            tuple((tuple(size), tuple(stride)) for size, stride, _ in self._outputs),
            source.numbers,
            source.outer,
            -1 if source.reduced is None else source.reduced,
            source.extents,
        )

    def __call__(self, *args: Any) -> list[torch.Tensor]:
        tensors, symbols = args[: self._count], args[self._count :]
        if not self._checked:
            self._check(tensors, symbols)
        layouts, numbers, outer, reduced, extents = self._numbers(*symbols)
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device=self.device)
            for (size, stride), (_, _, dtype) in zip(layouts, self._outputs, strict=True)
        ]
        if outer:
            self._launch([*tensors, *outputs, *numbers], outer, reduced, max(extents, default=0))
        return outputs

    def _check(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
        """Hold the first call's tensors against the strides that are in the kernel.

        :raises RuntimeError: an op before it made something else than it was said to make.
        """
        for tensor, (sizes, strides) in zip(tensors, self._layouts(*symbols), strict=True):
            pairs = zip(tensor.shape, tensor.stride(), sizes, strides, strict=True)
            if any(n != size or (n > 1 and s != stride) for n, s, size, stride in pairs):
                raise RuntimeError(
                    f"{self.__name__} was made for sizes {sizes}, strides {strides}; it is given "
                    f"{tuple(tensor.shape)} and {tensor.stride()}"
                )
        self._checked = True

    def _launch(self, args: list[Any], outer: int, reduced: int, extent: int) -> None:
        import triton.language as tl

        index = tl.int32 if max(extent, outer, reduced) <= NARROW else tl.int64
        places = None if self.source.reduced is None else reduced

        def run(config: Config) -> None:
            self.run(config, args, outer, index)

        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return run(self._config(outer, places, run))
        return run(self._config(outer, places, run))

    def run(self, config: Config, args: Sequence[Any], outer: int, index: Any) -> None:
        """Launch with a configuration. Two products are rounded one by one, as eager's are."""
        function = function_of(self.source.persistent if config.persistent else self.source.looped)
        blocks = {} if config.reduced_block is None else {"RBLOCK": config.reduced_block}
        function[(-(-outer // config.outer_block),)](
            *args,
            INDEX=index,
            XBLOCK=config.outer_block,
            **blocks,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )

    def _config(self, outer: int, reduced: int | None, run: Callable[[Config], None]) -> Config:
        """The configuration for these sizes, tuned where that is wanted."""
        # Sizes between two powers of two share one; what must hold them exactly is in the key.
        bucket = (_autotune.power_of_two(outer), reduced and _autotune.power_of_two(reduced))
        key = (self.source.looped, self.device, bucket)
        if key in _tuned:
            return _tuned[key]
        candidates = _autotune.configs(outer, reduced, self.source.columns)
        if not self.autotune or INTERPRETING or len(candidates) == 1:
            return _tuned.setdefault(key, candidates[0])
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]
        _tuned[key] = best = _autotune.fastest(candidates, run)
        return best


def _evaluator(sizes: Any, names: Mapping[Any, str]) -> Callable[..., Any]:
    """A function of the symbols' numbers that gives nested sizes as numbers."""

    def text(part: Any) -> str:
        if isinstance(part, tuple | list):
            return f"({''.join(text(item) + ', ' for item in part)})"
        return python_source(part, names)

    code = f"lambda {', '.join(names.values())}: {text(sizes)}"
    function: Callable[..., Any] = eval(code, {"math": __import__("math")})
    if names:
        return function
    constant = function()
    return lambda: constant
