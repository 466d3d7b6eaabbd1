"""Turns the errors of the libraries that load a model into one sentence.

Broken files of a model can make a library raise anything. `soundness` rejects most of them before; `reported` handles
the rest. Stdlib only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.wrong_settings import wrong_setting
from oaiserve.errors import StartupError
from oaiserve.system_memory import shortage

log = logging.getLogger(__name__)


@contextmanager
def reported(failure: str) -> Iterator[None]:
    """Raise StartupError instead of any error in the `with` block, as in "No model could be loaded from 'x': why".

    A library may raise even a panic of Rust code, which is not an Exception. The traceback is logged at --log-level
    debug.
    """
    try:
        yield
    except (StartupError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        log.debug("%s", failure, exc_info=True)
        text = " ".join(str(error).split())
        if (short := shortage(error)) is not None:
            reason = short if isinstance(error, MemoryError) else f"{short} ({text[:200]})"
        elif (wrong := wrong_setting(error)) is not None:
            reason = wrong
        elif "trust_remote_code" in text:
            reason = "it needs code that comes with the model (auto_map), and oaiserve never runs such code"
        elif isinstance(error, OSError | ValueError | RuntimeError | ImportError | BadFile) and text:
            reason = text if len(text) <= 300 else text[:300] + "…"
        else:  # The text of other errors is unclear without their class name.
            reason = named(error)
        raise StartupError(f"{failure}: {reason}") from error


def named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if text:
        return f"{type(error).__name__}: {text[:300]}"
    return type(error).__name__


@contextmanager
def tensors_named(*, allows_unread: bool = False) -> Iterator[None]:
    """Raise ValueError with the name of a tensor of the wrong size, if transformers finds one in the `with` block.

    The error of transformers only refers to a long report in the log. That report is logged at --log-level debug. So is
    a report of missing tensors, which the caller rejects, and of unread tensors if the model `allows_unread`.
    """
    report = _ReportFilter(allows_unread)
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(report)
    try:
        yield
    except RuntimeError as error:
        if not report.tensors:
            raise
        raise ValueError(f"{' and '.join(report.tensors[:2])}: not as the model needs it") from error
    finally:
        logger.removeFilter(report)


class _ReportFilter(logging.Filter):
    def __init__(self, allows_unread: bool) -> None:
        super().__init__()
        if allows_unread:
            self._unwanted = r"\| *(MISSING|UNEXPECTED)\b"
        else:
            self._unwanted = r"\| *MISSING\b"
        self.tensors: list[str] = []  # tensors that could not be converted, or have a wrong size

    def filter(self, record: logging.LogRecord) -> bool:
        text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        self.tensors += re.findall(r"^(\S.*?) *\| *(?:CONVERSION|MISMATCH)\b", text, re.MULTILINE)
        is_unwanted = bool(self.tensors) or re.search(self._unwanted, text) is not None
        if is_unwanted:
            log.debug("%s", text)
        return not is_unwanted
