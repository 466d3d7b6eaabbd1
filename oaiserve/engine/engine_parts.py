"""The parts of an engine: its model, its options and what follows from them, its clocks, and its meters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time_ns

from oaiserve.config import EngineOptions
from oaiserve.engine.accounts.costs import Rates
from oaiserve.engine.accounts.energy import Energy
from oaiserve.engine.accounts.machine_time import MachineTime, throttling_file
from oaiserve.engine.accounts.machine_users import MachineUsers
from oaiserve.engine.default_limits import default_limits
from oaiserve.engine.drafting.drafts import Drafts
from oaiserve.engine.requests.open_request import Bounds
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.served_model import ServedModel
from oaiserve.explain.step_cost_fit import Run
from oaiserve.runtime import THREADS, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine. `of` makes them for a model; tests replace some by doubles."""

    model: ServedModel
    options: EngineOptions
    limits: Limits
    bounds: Bounds
    overlap: bool  # launch a step before the results of the previous one are on the host
    has_drafts: bool
    drafts: Drafts | None
    energy: Energy  # must be read once a second
    rates: Rates
    machine: MachineTime | None  # divides the time of steps into its causes; None with --no-explain
    users: MachineUsers | None  # finds out what used the machine while the engine waited
    cores_ns: Callable[[], int]  # CPU time of the process, which is divided among requests
    learn: Run | None  # runs the fits of step costs; None: a worker does
    runtime: Runtime

    @classmethod
    def of(
        cls,
        model: ServedModel,
        options: EngineOptions | None = None,
        *,
        machine: MachineTime | None = None,
        energy: Energy | None = None,
        drafts: Drafts | None = None,
        cores_ns: Callable[[], int] = process_time_ns,
        learn: Run | None = None,
        runtime: Runtime = THREADS,
    ) -> EngineParts:
        """Return the parts of an engine for this model. All but the first two arguments are for tests."""
        options = options or EngineOptions()
        users = None
        if machine is None and options.explain:
            machine = MachineTime(throttling=throttling_file(), clock_ns=runtime.clock_ns)
            users = MachineUsers(machine.throttled_ns, machine.num_faults, clock_ns=runtime.clock_ns)
        energy = energy or Energy.found(runtime.clock_ns)
        # A model's state can't be rolled back to before a rejected draft.
        is_drafting = options.drafts == "lookup" or (options.drafts == "auto" and model.device == "cpu")
        has_drafts = is_drafting and not model.num_states
        if drafts is None and has_drafts and model.pooling is None:
            drafts = Drafts(only_if_exact=options.drafts == "auto")
        return cls(
            model=model,
            options=options,
            limits=Limits(
                max_running=min(options.max_running, model.num_states or options.max_running),
                max_step_tokens=options.step_tokens(model.max_step_tokens_default),
                prefill_max_requests=options.prefill_max_requests,
            ),
            bounds=Bounds(
                max_model_len=model.max_model_len,
                queue_timeout_seconds=options.queue_timeout_seconds,
                request_timeout_seconds=options.request_timeout_seconds,
                **default_limits(options, model.default_params),
            ),
            overlap=options.overlap and model.runner.is_asynchronous,
            has_drafts=has_drafts,
            drafts=drafts,
            energy=energy,
            rates=Rates(model.block_bytes, model.weight_bytes, options.cost_per_hour, energy),
            machine=machine if options.explain else None,
            users=users,
            cores_ns=cores_ns,
            learn=learn,
            runtime=runtime,
        )
