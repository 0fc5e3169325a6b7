"""Requests alone, together and at the same time, all of which must be answered alike.

A configuration that merges requests wrongly loads like any other and fails only when requests meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError

from packager import parity
from packager.errors import VerificationError
from packager.goldens import Array
from packager.rows import joined
from packager.targets.triton.ensemble import FOLDER
from packager.targets.triton.infer import Model
from packager.traffic import difference, requests_of

PARALLEL = 8
"""Requests sent at the same time, for each instance of the model."""

CONNECT_SECONDS = 30.0


def ask(model: Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """One request.

    Raises:
        VerificationError: the server refuses it, or fails.
    """
    try:
        outputs: dict[str, Array] = model.run(feeds)
        return outputs
    except (ValueError, RuntimeError) as error:
        raise VerificationError(str(error)) from error


def check_alike(model: Model, connect: Callable[[], AbstractContextManager[Model]], golden: parity.Golden) -> None:
    """Rows alone, two together, and many at the same time.

    Raises:
        VerificationError: the answers differ, or one fails.
    """
    requests = requests_of(golden, model.max_batch > 0, PARALLEL)
    alone = [ask(model, feeds) for feeds in requests]
    in_twos(model, requests, alone, golden)
    for one, answer in zip(alone, in_parallel(connect, requests), strict=True):
        agree(one, answer, golden, "parallel requests")


def check_steps(bundle: Path, url: str) -> int:
    """Each step of a bundle's ensemble alone, and the whole: golden cases, and requests that meet.

    Returns:
        How many golden cases were answered rightly; 0 where the bundle has no ensemble.

    Raises:
        VerificationError: one isn't served, or answers wrongly.
    """
    answered = 0
    for folder in sorted(path for path in (bundle / FOLDER).glob("*") if path.is_dir()):
        what = f"{folder.name} of the ensemble"
        try:
            golden = parity.read_golden(folder / "golden")
            client = Model(folder, url)
        except (ValueError, RuntimeError) as error:
            raise VerificationError(f"{what}: {error}", "build the bundle again") from error
        with closing(client) as model:
            for case in golden.cases:
                outputs = ask(model, case.inputs)
                found = golden.judge(case, outputs)
                if not found.passed:
                    told = "; ".join(found.reasons)[:500]
                    raise VerificationError(f"{what} answers wrongly in golden case '{case.name}': {told}")
                answered += 1
            check_alike(model, partial(_closing_client, folder, url), golden)
    return answered


def _closing_client(folder: Path, url: str) -> AbstractContextManager[Model]:
    return closing(Model(folder, url))


def in_twos(
    model: Model, requests: Sequence[Mapping[str, Array]], alone: Sequence[Mapping[str, Array]], golden: parity.Golden
) -> None:
    """Two rows in one request, where the server takes as many.

    Raises:
        VerificationError: a row is answered differently than alone.
    """
    if model.max_batch < 2:
        return
    two = ask(model, joined(requests[:2]))
    for index in range(2):
        row = {output: array[index : index + 1] for output, array in two.items()}
        agree(alone[index], row, golden, "a batch of 2")


def in_parallel(
    connect: Callable[[], AbstractContextManager[Model]], requests: Sequence[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """All requests at the same moment.

    Args:
        connect: gives the client of one request, in the thread that sends it: one that speaks HTTP belongs to it.
        requests: what is asked.

    Returns:
        The answers, in the order of the requests.

    Raises:
        VerificationError: one is refused, or fails.
    """
    start = Barrier(len(requests))

    def one(feeds: Mapping[str, Array]) -> dict[str, Array]:
        with connect() as client:
            with suppress(BrokenBarrierError):  # another had no connection, and tells so
                start.wait(CONNECT_SECONDS)
            return ask(client, feeds)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


def agree(alone: Mapping[str, Array], other: Mapping[str, Array], golden: parity.Golden, how: str) -> None:
    """Hold an answer against the one to the same request alone.

    Raises:
        VerificationError: they differ by more than the bundle's tolerances.
    """
    told = difference(alone, other, golden)
    if told:
        raise VerificationError(
            f"Triton answers differently to {how} than to one request alone: {told}",
            "the rows of a batch influence each other: build with max_batch = 0",
        )
