"""Compares packed attention with a model's own attention, module by module and in float32.

Rounding explains a millionth in float32, also where real weights have large biases and activations. In 16 bits it
explains more than many faults do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, PreTrainedModel

from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, Difference, difference_by_row
from oaiserve.plugins.pooling.model.attention import packed_attention

_CHECKED = "oaiserve_packed_checked"
_HALVES = (torch.bfloat16, torch.float16)

Call = tuple[Module, Tensor, Tensor]  # a module that attends, and what it got and gave in the packed run: [T, width]


class Unpackable(Exception):
    """The texts of a step cannot be packed into one row. The message is the reason, without a full stop."""


def refuse_unless_equal(
    model: PreTrainedModel, packed: Callable[[], Tensor], own: Callable[[int], Tensor], lengths: list[int]
) -> None:
    """Raise Unpackable unless a model computes packed texts as its own code computes each text.

    `packed` returns the rows of all texts, and `own` those of one. The model has its own attention again afterwards.
    """
    before = model.config._attn_implementation
    run = _PackedRun(model)
    with torch.no_grad(), _in_float32(model):
        try:
            AttentionInterface.register(_CHECKED, run.attend)
            model.set_attn_implementation(_CHECKED)
            if model.config._attn_implementation != _CHECKED:
                raise Unpackable("its code does not use transformers' attention interface")
            with run.recorded():
                logits = packed()
        finally:
            model.set_attn_implementation(before)
        if not run.calls:
            raise Unpackable("its code does not use transformers' attention interface")
        start = 0
        for index, length in enumerate(lengths):
            with run.compared(slice(start, start + length)):
                expected = own(index)
            if logits.shape[0] == sum(lengths):
                rows = logits[start : start + length]
            else:
                rows = logits[index : index + 1]
            _refuse_unless_close("its output", rows, expected)
            start += length


class _PackedRun:
    """Inputs and outputs of each attention module for packed texts, to be compared with those of its own code."""

    def __init__(self, model: Module) -> None:
        self.calls: list[Call] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[tuple[Module, Tensor | None]] = []
        self._attending: set[Module] = set()

    def attend(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        self._attending.add(module)
        return packed_attention(module, *args, **kwargs)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def before(module: Module, args: Any, kwargs: Any) -> None:
            self._running.append((module, _states(args, kwargs)[1]))

        def behind(module: Module, _: Any, output: Any) -> None:
            _, states = self._running.pop()
            if module not in self._attending:
                return
            first = _first(output)
            if states is None or states.shape[0] != 1 or first.shape[:2] != states.shape[:2]:
                raise Unpackable(f"'{self._names[module]}' gets or gives more than the numbers of each token")
            self.calls.append((module, states[0], first[0]))

        with _hooked(self._names, before, behind):
            yield

    @contextmanager
    def compared(self, rows: slice) -> Iterator[None]:
        """Compare the forward of one text, whose tokens are `rows` of the packed ones.

        Each module gets and gives what it got and gave in the packed run, once that has been compared. So rounding does
        not grow, and a wrong layer is not hidden by the layers after it.
        """
        calls = iter(self.calls)
        running: list[Call] = []

        def before(module: Module, args: Any, kwargs: Any) -> Any:
            call = next(calls, None)
            if call is None or call[0] is not module:
                raise Unpackable("its layers run in another order")
            running.append(call)
            name, states = _states(args, kwargs)
            assert states is not None  # present, as in the packed run
            replaced = call[1][None, rows]
            _refuse_unless_close(f"what '{self._names[module]}' gets", replaced, states)
            if name is None:
                return (replaced, *args[1:]), kwargs
            return args, kwargs | {name: replaced}

        def behind(module: Module, _: Any, output: Any) -> Any:
            replaced = running.pop()[2][None, rows]
            _refuse_unless_close(f"'{self._names[module]}'", replaced, _first(output))
            if isinstance(output, tuple):
                return (replaced, *output[1:])
            return replaced

        with _hooked({module: "" for module, *_ in self.calls}, before, behind):
            yield


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Tensor | None]:
    """Return the hidden states among a module's arguments, with their name if they have one."""
    if args:
        name = None
    else:
        name = next((name for name in kwargs if "hidden" in name), None)
    states = args[0] if args else kwargs.get(name or "")
    return name, states if isinstance(states, Tensor) else None


def _first(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, Tensor)
    return first


def _refuse_unless_close(what: str, values: Tensor, expected: Tensor) -> None:
    apart = Difference(f"packed, {what}", difference_by_row(values, expected.view_as(values)), FLOAT32_TOLERANCE)
    if apart.is_beyond_rounding:
        raise Unpackable(str(apart))


@contextmanager
def _hooked(modules: dict[Module, str], before: Callable[..., Any], behind: Callable[..., Any]) -> Iterator[None]:
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(behind))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Compute in float32: each module has its weights in it while it runs, so there is no second copy of a model."""
    running: list[list[tuple[Tensor, Tensor]]] = []  # the tensors of each module that runs, and their own data

    def widen(module: Module, args: Any, kwargs: Any) -> Any:
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        running.append([(tensor, tensor.data) for tensor in tensors if tensor.dtype in _HALVES])
        for tensor, original in running[-1]:
            tensor.data = original.float()
        return _widened(args), _widened(kwargs)

    def restore(*_: Any) -> None:
        for tensor, original in running.pop():
            tensor.data = original

    if model.dtype == torch.float32:
        yield
        return
    try:
        with _hooked(dict.fromkeys(model.modules(), ""), widen, restore):
            yield
    finally:
        while running:
            restore()


def _widened(value: Any) -> Any:
    """Return the floating-point tensors of a module's arguments in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_widened(one) for one in value)
    if type(value) is dict:
        return {name: _widened(one) for name, one in value.items()}
    return value
