"""Starts a model from the start cache: the native step alone, without transformers."""

from __future__ import annotations

import logging

from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.cache import CheckedModel, recall_model, start_checked
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.files.start_cache import NotRemembered, of_record

log = logging.getLogger(__name__)


class Remembered:
    """The start of a model that an earlier start has compared with transformers' code."""

    name = "from the start cache"
    _checked: CheckedModel

    def accepts(self, request: StartRequest) -> str | None:
        if request.key is None:
            return "these options, or this device, do without the native step"
        if request.options.recheck:
            return "--recheck asks transformers' code again"
        try:
            with request.times.part("start cache"):
                self._checked = recall_model(request.key, request.options)
        except NotRemembered as reason:
            return str(reason)
        return None

    def start(self, request: StartRequest) -> ServedModel:
        options, checked = request.options, self._checked

        def start() -> Started:
            with of_record(checked.path):
                adaptable = checked.decoder.adaptable()
                refuse_unless_they_fit(options.adapters, adaptable)
                num_blocks, num_states = cpu_sizes(checked.spec, options)
                num_threads = options.cpu_threads or default_threads()
                native = start_checked(
                    checked, options, num_blocks=num_blocks, num_threads=num_threads, reserved=request.reserved
                )
                sizes = {"num_blocks": num_blocks, "num_states": num_states}
                return started_on_cpu(native, checked.spec, options, adaptable, **sizes)

        try:
            served = assemble(request.load("weights and check", start), request.tokenizer, options)
        except NotRemembered as reason:
            raise Declined(str(reason)) from reason
        log.debug(
            "The native step is ready. It was compared with transformers' code on %s, with the same files, versions "
            "and CPU (--recheck compares again)",
            checked.day,
        )
        return served
