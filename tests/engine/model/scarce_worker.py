"""The worker process of a tensor-parallel model, with a device that has no room for every third piece of its work.

It has room for a single token always, so that each sequence can go on.
"""

from oaiserve.engine.model.parallel.executor import Capacity
from oaiserve.engine.model.parallel.messages import Copies, Work
from oaiserve.engine.start import worker

num_asked = 0  # pieces of work


def is_here(self: Capacity, work: Work) -> bool:
    global num_asked
    num_asked += 1
    is_single = len(work.blocks) == 1 if isinstance(work, Copies) else work.num_tokens == 1
    return is_single or num_asked % 3 != 0


if __name__ == "__main__":
    Capacity.is_here = is_here
    worker.main()
