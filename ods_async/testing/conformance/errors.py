"""Public errors keep class, text and fields, wherever they go (B11)."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import ods_async as ods
from ods_async.testing.conformance.ways import Way

PUBLIC = tuple(
    sorted(
        name
        for name in ods.__all__
        if isinstance(getattr(ods, name), type) and issubclass(getattr(ods, name), ods.OdsError)
    )
)
FIELDS = {"argument": "x", "value": "None", "count": 3, "parts": (1, "two", None)}


def _made(name: str) -> ods.OdsError:
    error: ods.OdsError = getattr(ods, name)("what happened, and what to do", **FIELDS)
    error.add_note("a note")
    return error


def _raise(name: str) -> None:
    raise _made(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_b11_every_public_error_survives_pickling(name: str) -> None:
    """B11: class, text, fields, notes."""
    error = _made(name)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(error, protocol))
        assert (type(twin), str(twin), twin.fields) == (type(error), str(error), FIELDS)
        assert twin.count == 3
        assert twin.__notes__ == ["a note"]


def test_b11_every_public_error_survives_a_child_process() -> None:
    """B11: as ``concurrent.futures`` hands it over."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        for name in PUBLIC:
            error = pool.submit(_raise, name).exception()
            assert isinstance(error, ods.OdsError)
            assert (type(error).__name__, str(error), error.fields) == (name, str(_made(name)), FIELDS)


class _Failing(IterableDataset[Any]):
    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise _made(self.name)


@pytest.mark.parametrize("name", ["DataUnavailableError", "OnlineDataBudgetExhaustedError", "WorkerExitedError"])
def test_b11_public_errors_survive_a_dataloader_worker(name: str) -> None:
    """B11: the class, and the text within torch's own."""
    loader: Any = DataLoader(_Failing(name), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(getattr(ods, name), match="what happened, and what to do"):
        list(loader)


def test_b11_an_error_from_the_service_is_the_same_on_every_way(plain: Way) -> None:
    """B11, B23: class, fields, and a pickled copy that equals it."""
    with pytest.raises(ods.DataUnavailableError) as caught:
        plain.sample_batch(3, 13, "segment")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.fields) == (str(caught.value), caught.value.fields)
