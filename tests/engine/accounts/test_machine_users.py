"""Who used the machine while the engine waited, as files of a test tell it."""

from pathlib import Path

import pytest

from oaiserve.engine.accounts.machine_users import (
    DISK,
    HIDDEN,
    HOST,
    LIMIT,
    MOST_USERS,
    TICK_NS,
    WAITED_NS,
    MachineUsers,
)
from oaiserve.facts.record import SLOW_CLOCK

SECOND_NS = 1_000_000_000
OWN = 7


class Machine:
    """A folder like /proc, with accounts that a test writes, and an engine that waits for all of each second."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "proc"
        self.now_ns = 0
        self.waited_ns = 0
        self.throttled_ns = 0
        self.num_faults = 0
        self.busy = 1000
        self.stolen = 0
        self.unexplained_ns = 0
        self.processes = {OWN: ("oaiserve", 300), 11: ("make", 100), 12: ("a) b (c", 50)}
        self.users = MachineUsers(
            lambda: self.throttled_ns, lambda: self.num_faults, root, OWN, clock_ns=lambda: self.now_ns
        )

    def use(self, ticks: dict[int, int], hidden: int = 0) -> None:
        for number, used in ticks.items():
            name, before = self.processes.get(number, ("new", 0))
            self.processes[number] = name, before + used
            self.busy += used
        self.busy += hidden

    def second(self, waited_ns: int = SECOND_NS) -> None:
        """Write the accounts, and look."""
        for number, (name, ticks) in self.processes.items():
            (self.folder / str(number)).mkdir(parents=True, exist_ok=True)
            fields = " ".join(["S", *"0" * 10, str(ticks), "0", *"0" * 9])
            (self.folder / str(number) / "stat").write_text(f"{number} ({name}) {fields}\n")
        (self.folder / "stat").write_text(f"cpu {self.busy} 0 0 5 6 0 0 {self.stolen} 0 0\ncpu0 1 2 3\n")
        self.now_ns += SECOND_NS
        self.waited_ns += waited_ns
        self.users.look(self.waited_ns, self.unexplained_ns)

    def found(self) -> dict[str, int]:
        return self.users.between(0, self.now_ns)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.second()
    return machine


def test_other_processes_are_named_with_their_time_of_cores(machine: Machine) -> None:
    machine.use({OWN: 40, 11: 90, 12: 30})
    machine.second()
    assert machine.found() == {"make (process 11)": 90 * TICK_NS, "a) b (c (process 12)": 30 * TICK_NS}


@pytest.mark.parametrize("user", [HIDDEN, HOST, LIMIT, DISK])
def test_what_no_process_used_has_a_name(machine: Machine, user: str) -> None:
    if user == HIDDEN:
        machine.use({OWN: 40}, hidden=50)
    elif user == HOST:
        machine.stolen += 50
    elif user == LIMIT:
        machine.throttled_ns += 50 * TICK_NS
    else:
        machine.num_faults += 3
    machine.second()
    assert machine.found() == {user: SECOND_NS if user == DISK else 50 * TICK_NS}


def test_only_the_time_of_the_request_counts(machine: Machine) -> None:
    for used in (80, 40, 20):
        machine.use({11: used})
        machine.second()
    until_ns = machine.now_ns
    assert machine.users.between(until_ns - 1.5 * SECOND_NS, until_ns) == {"make (process 11)": 40 * TICK_NS}
    assert machine.users.between(until_ns, until_ns + SECOND_NS) == {}


def test_a_second_without_waiting_is_not_read(machine: Machine) -> None:
    machine.use({11: 80})
    machine.second(waited_ns=WAITED_NS)
    machine.use({11: 80})
    machine.second()
    assert machine.found() == {}, "there was nothing to compare with"
    machine.use({11: 30})
    machine.second()
    assert machine.found() == {"make (process 11)": 30 * TICK_NS}


def test_a_new_process_has_not_used_what_it_used_before(machine: Machine) -> None:
    machine.use({99: 4000})
    machine.second()
    assert "new (process 99)" not in machine.found()


def test_few_users_are_named_and_none_that_hardly_used_anything(machine: Machine) -> None:
    machine.processes |= dict.fromkeys(range(20, 30), ("many", 10))
    machine.second()
    machine.use({number: number for number in range(20, 30)} | {11: 2})
    machine.second()
    assert len(machine.found()) == MOST_USERS
    assert "make (process 11)" not in machine.found()


def test_without_accounts_nobody_is_named(machine: Machine) -> None:
    machine.second()
    (machine.folder / "stat").unlink()
    machine.waited_ns += SECOND_NS
    machine.users.look(machine.waited_ns)
    assert machine.found() == {}


def set_clocks(root: Path, *khz: int) -> None:
    for core, number in enumerate(khz):
        folder = root / "sys/devices/system/cpu" / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "scaling_cur_freq").write_text(f"{number}\n")


@pytest.mark.parametrize("reason", ["waited", "unexplained"])
def test_a_lower_clock_frequency_is_named_where_steps_take_longer(tmp_path: Path, reason: str) -> None:
    set_clocks(tmp_path, 800_000, 3_000_000)
    machine = Machine(tmp_path)
    machine.second(waited_ns=0)
    set_clocks(tmp_path, 1_200_000, 800_000)
    machine.unexplained_ns += SECOND_NS if reason == "unexplained" else 0
    machine.second(waited_ns=SECOND_NS if reason == "waited" else 0)
    assert machine.found() == {SLOW_CLOCK: pytest.approx(0.6 * SECOND_NS)}


@pytest.mark.parametrize("khz", [2_400_000, 3_200_000])
def test_the_usual_clock_frequency_is_not_named(tmp_path: Path, khz: int) -> None:
    set_clocks(tmp_path, 3_000_000)
    machine = Machine(tmp_path)
    machine.second()
    set_clocks(tmp_path, khz)
    machine.second()
    assert machine.found() == {}


def test_a_lower_clock_frequency_is_not_named_while_steps_take_what_they_usually_do(tmp_path: Path) -> None:
    set_clocks(tmp_path, 3_000_000)
    machine = Machine(tmp_path)
    machine.second(waited_ns=0)
    set_clocks(tmp_path, 800_000)
    machine.second(waited_ns=0)
    assert machine.found() == {}


@pytest.mark.parametrize("content", ["", "<unknown>"])
def test_a_clock_frequency_that_cannot_be_read_is_not_named(tmp_path: Path, content: str) -> None:
    set_clocks(tmp_path, 3_000_000)
    machine = Machine(tmp_path)
    machine.second()
    (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").write_text(content)
    machine.second()
    assert machine.found() == {}
