"""Operations of torch, as they are dispatched: a double records them while the model computes as ever."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch nothing: they make views and memory.
NO_LAUNCH = {
    *("view", "_unsafe_view", "split", "split_with_sizes", "unsqueeze", "transpose", "t", "select", "slice", "expand"),
    *("flatten", "unflatten", "reshape", "permute", "unfold"),
    *("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "as_strided", "unbind", "squeeze"),
}


class Operations(TorchDispatchMode):
    """Records the operations of torch: the name of each, the name with its overload, and the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.overloads: list[str] = []
        self.shapes: list[list[torch.Size]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        self.overloads.append(function.__name__)
        self.shapes.append([arg.shape for arg in args if isinstance(arg, torch.Tensor)])
        return function(*args, **(kwargs or {}))
