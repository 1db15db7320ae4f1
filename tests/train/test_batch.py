"""Every field that a batch has arrives at the model, cut into micro-batches, ranks and columns as its tokens are."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from kos.memory.array import Array
from kos.train.config.flags import parse
from kos.train.data.batches import Dataset, Tokens, load_data
from kos.train.device.dry_run import DryCudaOps, DryOps
from kos.train.model.model import Model
from kos.train.ops import Batch
from kos.train.parallel.data import shard_batch
from tests.train.emulated_runs import text, train
from tests.train.host_kernels.engine import on_host
from tests.train.test_data import make
from tests.train.test_mixture import flags, folder
from tests.train.test_packing import dataset, lengths_of, row_of

__all__ = ["folder", "text"]
DRY = DryOps, DryCudaOps


class Full(Dataset):
    """Data with all fields: numbers that name a token's place, and documents of three tokens."""

    def read(self, step: int) -> tuple[str, ...]:
        return Batch._fields

    def windows(self, tokens: Tokens, starts: Iterable[int]) -> Batch:
        starts = list(starts)
        places = np.add.outer(starts, np.arange(self.seq_len)).astype(np.int32)
        documents = np.broadcast_to(np.arange(self.seq_len, dtype=np.int32) // 3 * 3, places.shape)
        return Batch(places % 251, places % 249, documents, (places / 7).astype(np.float32))


def _elements(batch: Batch) -> list[tuple[float, ...]]:
    batch = batch.map(lambda field: on_host(field) if isinstance(field, Array) else field)
    assert [field.dtype for field in batch] == [np.int32] * 3 + [np.float32]
    return [*zip(*(field.ravel().tolist() for field in batch), strict=True)]


DATA: dict[str, Callable[[Path], Dataset]] = {
    "drawn": lambda folder: make(np.arange(999), batch_size=8),
    "epochs": lambda folder: make(np.arange(4 * 29 + 1), batch_size=8, epochs=3),
    "packed": lambda folder: dataset(row_of(lengths_of(200, 30)), 30, batch_size=8),
    "packed epochs": lambda folder: dataset(row_of(lengths_of(200, 30)), 30, batch_size=8, epochs=3),
    "mixed": lambda folder: load_data(parse(flags(folder))),
}


@pytest.mark.parametrize("kind", DATA)
def test_any_number_of_ranks_sees_the_same_batches(kind, folder):
    data = DATA[kind](folder)
    for step in range(12):
        whole = data.batch(step)
        whole.check()
        for size, micro in ((1, 2), (2, 2), (4, 2), (8, 1)):
            of_ranks = [data.rows(step, rows) for rank in range(size) for rows in shard_batch(8, micro, rank, size)]
            for field, parts in zip(whole, zip(*of_ranks, strict=True), strict=True):
                assert field is None or (np.concatenate(parts) == field).all()
        assert (data.rows(step, [5, 0, 7, 2]).targets == whole.targets[[5, 0, 7, 2]]).all()
    assert (data.batch(0).tokens != data.batch(1).tokens).any()


@pytest.mark.parametrize(
    ("device", "ranks", "layout"),
    [("cpu", 1, {}), ("cpu", 2, {"pp": 2}), ("cpu", 2, {"cp": 2}), ("cuda", 2, {}), ("cuda", 2, {"cp": 2})],
    ids=str,
)
def test_all_fields_arrive(emulated, text, tmp_path, device, ranks, layout, data_of, monkeypatch):
    arrived, evaluated = [], []
    data, run_forward = data_of(Full), Model.forward

    def forward(self, weights, slot, batch, x_nD=None, saves=True, cache=None):
        out = run_forward(self, weights, slot, batch, x_nD, saves, cache)
        if self.local.last and slot.batch.document_starts is not None and not isinstance(self.ops, DRY):
            (arrived if saves else evaluated).append(_elements(slot.batch))
        return out

    monkeypatch.setattr(Model, "forward", forward)
    options = layout if device == "cpu" else {"graph": False, **layout}
    train(text, tmp_path, device, ranks=ranks, steps=1, save_every=0, **options)
    assert sorted({x for each in arrived for x in each}) == sorted(set(_elements(data[0].batch(0))))
    assert {len(each) for each in arrived} == {2 * 8 // layout.get("cp", 1)}
    of_validation = [x for starts in data[0].val_starts() for x in _elements(data[0].windows(data[0].val, starts))]
    assert sorted({x for each in evaluated for x in each}) == sorted(set(of_validation))
