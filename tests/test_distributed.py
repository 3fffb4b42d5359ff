"""Several processes: DDP, FSDP2 and DTensor against one process, on gloo and on NCCL.

The processes run every check of processes.py once, since starting them takes longer than all of it;
each test then looks at what became of its check. On gloo there are two, on the CPU; on NCCL one for
each GPU.
"""

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import processes

LIMIT = 240  # seconds for all checks; a process that waits for ever must not hold up the tests


def run_all(backend, world, folder):
    """Starts the processes and returns what went wrong with them as a whole, or nothing."""
    names = list(processes.checks())
    arguments = (world, backend, folder, names)
    context = mp.spawn(processes.start, arguments, world, join=False)
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                return f"the processes had not finished after {LIMIT} s"
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return str(error)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return ""


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def outcomes(request, tmp_path_factory):
    """For the name of a check: what each process wrote about it, one text per process."""
    backend = request.param
    world = torch.cuda.device_count() if backend == "nccl" else 2
    folder = tmp_path_factory.mktemp(backend)
    fault = run_all(backend, world, folder)

    def of(name):
        files = [folder / f"{name}.{rank}" for rank in range(world)]
        return [file.read_text() if file.exists() else f"not reached: {fault}" for file in files]

    return of


NAMES = list(processes.checks())


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(outcomes, name):
    failures = [text for text in outcomes(name) if text]
    assert not failures, failures[0]


def test_channels_are_split_only_where_each_device_gets_one():
    from types import SimpleNamespace

    from convt_reduce._sharding import _splits

    three = SimpleNamespace(shape=(3,))
    assert [channels for channels in range(1, 10) if _splits(three, channels)] == [3, 5, 6, 7, 8, 9]
