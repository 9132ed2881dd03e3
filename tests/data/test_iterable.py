"""User-provided iterables and DataLoaders: every sample once on any number of ranks, resumed at the exact sample."""

import json
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.cases import check_each, has_slow_tests
from helpers.groups import free_port, losses, start_ranks
from helpers.surroundings import short_outputs
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import toolkit
from toolkit.data.tokens.iterable import DataLoaderRows, IterableRows
from toolkit.errors import DataError, UserError
from toolkit.models.gpt import GPT

LENGTH, PER_EPOCH = 7, 50
MODEL = toolkit.ModelConfig(vocab_size=400, block_size=8, n_layer=1, n_embd=16, n_head=2)
TRAIN = {"max_steps": 8, "global_batch_size": 16, "micro_batch_size": 2, "save_interval": 3, "learning_rate": 3e-3}


def row(number: int) -> torch.Tensor:
    """Return tokens of which the first is the number of the sample."""
    return torch.cat([torch.tensor([number]), (torch.arange(LENGTH) * number) % 400])


class Rows:
    """Map-style: 300 samples."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        return row(index)


class Iterable(IterableDataset):
    """300 samples without an end in sight: 50 to an epoch, other ones in the next."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        first = PER_EPOCH * (self.epoch % 6)
        yield from map(row, range(first, first + PER_EPOCH))


class Stateful(Iterable):
    """Goes on where its state says, and counts what it has read."""

    place, reads = 0, 0

    def __iter__(self):
        first = PER_EPOCH * (self.epoch % 6)
        while self.place < PER_EPOCH:
            self.place, self.reads = self.place + 1, self.reads + 1
            yield row(first + self.place - 1)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Forgetful(Stateful):
    """Its state does not bring it back."""

    def state_dict(self):
        return {"place": self.place // 2}


def distributed_loader():
    world = {"num_replicas": toolkit.get_world_size(), "rank": toolkit.get_rank()}
    sampler = DistributedSampler(Rows(), **world, shuffle=True, seed=3)
    return DataLoader(Rows(), batch_size=5, sampler=sampler, collate_fn=list)


def run(out_dir: Path, dataset, resume=False, **train) -> list[int]:
    """Train; return the samples that this rank has trained on."""
    seen: list[int] = []
    forward = GPT.forward

    def recording(self, input_ids, *args, **options):
        if type(input_ids) is torch.Tensor:  # not a fake tensor, on which memory is measured
            seen.extend(input_ids[:, 0].tolist())
        return forward(self, input_ids, *args, **options)

    with mock.patch.object(GPT, "forward", recording), short_outputs():
        strategy = "fsdp" if toolkit.get_world_size() > 1 else "auto"
        options = {"accelerator": "cpu", "devices": "auto", "strategy": strategy}
        toolkit.train(MODEL, dataset, train=TRAIN | train, out_dir=out_dir, resume=resume, **options)
    return seen


KINDS = {"map": Rows, "iterable": Iterable, "stateful": Stateful, "loader": distributed_loader}


def rank_main(
    rank: int, size: int, port: int, folder: Path, kinds: tuple[str, ...], should_resume: bool = True
) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    for kind in kinds:
        seen = run(folder / kind, KINDS[kind]())
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(seen))
        if should_resume:
            run(folder / f"{kind}-again", KINDS[kind](), resume=folder / kind / "step-00000003")
    toolkit.cleanup_distributed()


def samples(folder: Path, kind: str) -> Counter:
    return Counter(n for path in folder.glob(f"{kind}-?.json") for n in json.loads(path.read_text()))


@pytest.fixture(scope="module")
def one(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    kinds = ("iterable", "stateful", "map") if has_slow_tests(request) else ("iterable",)
    with mock.patch.dict(os.environ):
        rank_main(0, 1, free_port(), folder, kinds, should_resume=False)
    return folder


CASES = [
    (2, ("iterable",)),
    pytest.param(2, ("loader",), marks=pytest.mark.slow),
    pytest.param(4, tuple(KINDS), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "kinds"), CASES)
def test_every_sample_once_on_any_number_of_ranks(size, kinds, one, tmp_path):
    """N3, and S2: a resumed run ends with the same bits."""
    start_ranks(rank_main, (size, free_port(), tmp_path, kinds), size)
    n = TRAIN["max_steps"] * TRAIN["global_batch_size"]
    for kind in kinds:
        found = samples(tmp_path, kind)
        assert found.total() == n and max(found.values()) == 1, kind
        assert losses(tmp_path / f"{kind}-again") == losses(tmp_path / kind)[3:]
        assert final(tmp_path / f"{kind}-again") == final(tmp_path / kind)
        if kind != "loader":  # its rows are the rank's
            assert found == samples(one, kind) and (kind == "map" or found == Counter(range(n)))
            assert losses(tmp_path / kind) == pytest.approx(losses(one / kind), rel=1e-5)


def final(folder: Path) -> bytes:
    return (folder / "final" / "lit_model.pth").read_bytes()


@pytest.mark.slow
def test_run_is_resumed_on_another_number_of_ranks(one, tmp_path):
    """Of one rank on two; what was trained on is read again only where there is no other way, and that is said."""
    for kind in ("stateful", "iterable"):
        arguments = (2, free_port(), tmp_path, kind, one / kind / "step-00000006")
        start_ranks(resume_main, arguments, 2)
        assert samples(tmp_path, kind) == Counter(range(6 * 16, 8 * 16))
        assert losses(tmp_path / kind) == pytest.approx(losses(one / kind)[6:], rel=1e-5)


def resume_main(rank: int, size: int, port: int, folder: Path, kind: str, checkpoint: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(run(folder / kind, KINDS[kind](), resume=checkpoint)))


def test_resume_goes_on_from_the_state_of_the_iterable():
    """What was trained on is read again only where there is no other way, and that is said."""
    for make, note in ((Stateful, ""), (Iterable, "Iterable has no state_dict() to resume from: reads 70 rows again")):
        rows = IterableRows(make(), None)
        order = rows.order(0, {})
        expected = [rows[p]["input_ids"].tolist() for p in range(0, 300, 2)]
        source = make()
        again = IterableRows(source, None)
        reads = getattr(source, "reads", 0)
        assert again.order(0, json.loads(json.dumps(order.state(270)))).note.startswith(note)
        assert again.note.startswith("Iter") == bool(note)
        assert [again[p]["input_ids"].tolist() for p in range(270, 300, 2)] == expected[135:]
        assert getattr(source, "reads", 0) - reads < 150


@pytest.mark.parametrize(("drop_last", "samples"), [(False, 18), (True, 16)])
def test_epochs_of_a_loader_end_a_run(tmp_path, drop_last, samples):
    loader = DataLoader([row(i) for i in range(18)], batch_size=4, collate_fn=list, drop_last=drop_last)
    limits = {"epochs": 1, "max_steps": 40, "global_batch_size": 4}
    assert run(tmp_path, loader, **limits)[:samples] == list(range(samples))
    assert (tmp_path / "logs" / "metrics.csv").read_text().splitlines()[-1].startswith("5," if samples == 18 else "4,")


@pytest.mark.slow
def test_what_an_iterable_must_do(tmp_path, capsys):
    generator = map(row, range(40))
    with pytest.raises(DataError, match="has ended after 40 rows, and map cannot restart.*step-00000002 is saved"):
        run(tmp_path / "generator", generator)
    assert run(tmp_path / "generator", map(row, range(200)), resume="auto") == list(range(32, 128))

    run(tmp_path / "no length", Iterable(), epochs=1)
    assert "note: epochs are not counted: the number of rows of this data is unknown" in capsys.readouterr().out
    with pytest.raises(UserError, match="dataset: yields no rows"):
        run(tmp_path / "nothing", [].__iter__())


def test_rows_that_differ_when_iterated_again_are_refused():
    """Also of an iterable that shards itself once the ranks are connected."""

    class Changing(Iterable):
        first = 0

        def __iter__(self):
            self.first += 1
            return map(row, range(self.first, 50))

    rows = IterableRows(Changing(), None).order(0, {})
    with pytest.raises(DataError, match="item 0 changed between reads; .*set_epoch"):
        rows[0]


def test_a_state_that_does_not_lead_back_is_not_used():
    rows = IterableRows(Forgetful(), None)
    order = rows.order(0, {})
    expected = [rows[p]["input_ids"].tolist() for p in range(30, 340)][290:]
    again = IterableRows(Forgetful(), None)
    note = again.order(0, order.state(320)).note
    assert "load_state_dict() of Forgetful did not restore its next row: reads" in note
    assert [again[p]["input_ids"].tolist() for p in range(320, 340)] == expected


def test_all_batch_formats_give_the_same_rows():
    blocks = [row(i) for i in range(10)]
    pairs = [(block[:-1], block[1:]) for block in blocks]
    mappings = [{"input_ids": x, "labels": y} for x, y in pairs]
    loaders = {
        "blocks": DataLoader(torch.stack(blocks), batch_size=4),
        "pairs": DataLoader(pairs, batch_size=2, num_workers=1),
        "mappings": DataLoader(mappings, batch_size=3),
        "lists": DataLoader(blocks, batch_size=3, collate_fn=list),
        "unbatched": DataLoader(blocks, batch_size=None),
    }
    readers = [DataLoaderRows(loader, None, False) for loader in loaders.values()]
    for rows in [*readers, IterableRows(pairs, None), IterableRows(iter(mappings), None)]:
        assert [x["labels"].tolist() for x in rows.first] == [y.tolist() for _, y in pairs]
    with pytest.raises(UserError, match="item 0 of dataset: has no labels; its keys are input_ids"):
        DataLoaderRows(DataLoader([{"input_ids": x} for x, _ in pairs]), None, False)


def test_shuffling_loader_gives_the_same_rows_again():
    """With a generator and without; the training's own random state does not change."""
    before = torch.get_rng_state()
    for make in (lambda: None, lambda: torch.Generator().manual_seed(5)):
        read = []
        for _ in range(2):
            loader = DataLoader([row(i) for i in range(40)], shuffle=True, collate_fn=list, generator=make())
            rows = DataLoaderRows(loader, None, False).order(0, {})
            read.append([rows[p]["input_ids"][0].item() for p in range(90)])
        assert read[0] == read[1] and sorted(read[0][:40]) == sorted(read[0][40:80]) == list(range(40))
        assert read[0][:40] != read[0][40:80]
    assert torch.equal(before, torch.get_rng_state())


def test_ranks_with_the_same_samples_or_other_ones_are_refused():
    def loader(allow_duplicates=False, **options) -> DataLoaderRows:
        return DataLoaderRows(
            DataLoader(options.pop("dataset", Rows()), collate_fn=list, **options), None, allow_duplicates
        )

    def part(rank: int, size: int = 2) -> DataLoaderRows:
        return loader(sampler=DistributedSampler(Rows(), size, rank))

    def shuffled(seed: int) -> DataLoaderRows:
        return loader(shuffle=True, generator=torch.Generator().manual_seed(seed))

    def iterable(first: int) -> IterableRows:
        return IterableRows([row(i) for i in range(first, 50)], None)

    same = r"DataLoader over \w+: feeds the same samples to several ranks; pass the dataset itself"
    cases = [
        (loader(), loader(), same),
        (loader(shuffle=True), loader(shuffle=True), same),
        (shuffled(seed=1), shuffled(seed=2), same),
        (loader(dataset=Iterable()), loader(dataset=Iterable()), same),
        (part(0), part(0), same),
        (part(0, 4), part(1, 4), "its DistributedSampler has rank 0 of 4 on rank 0 of 2"),
        (
            iterable(0),
            iterable(1),
            "list: yields other rows on rank 1 .*yield the same rows on every rank; toolkit splits",
        ),
        (iterable(0), iterable(0), None),
        (part(0), part(1), None),
        (loader(allow_duplicates=True), loader(allow_duplicates=True), None),
    ]

    def check(first: IterableRows, second: IterableRows, message: str | None) -> None:
        if message is None:
            return first.require_disjoint([first.rank_info(), second.rank_info()])
        with pytest.raises(UserError, match=message):
            first.require_disjoint([first.rank_info(), second.rank_info()])

    check_each(check, cases)


def test_loader_is_not_resumed_on_another_number_of_ranks():
    rows = DataLoaderRows(DataLoader(Rows(), collate_fn=list), None, False)
    saved = rows.order(0, {}).state(32)
    assert saved["ranks"] == 1
    with pytest.raises(UserError, match="the run had 2 ranks, not 1; resume on 2"):
        rows.order(0, saved | {"ranks": 2})
    with pytest.raises(UserError, match="DataLoader: yields different rows than before"):
        DataLoaderRows(DataLoader(Rows(), shuffle=True, collate_fn=list), None, False).order(0, saved)
    assert rows.order(0, saved).note.startswith("DataLoader: reads 32 rows again")


def test_options_that_have_no_effect_are_refused(tmp_path):
    for options, message in [
        ({"num_workers": 1}, "num_workers 1: only for a dataset with len"),
        ({"allow_duplicate_data": True}, "allow_duplicate_data True: has no effect without a DataLoader"),
        ({"val_dataset": Iterable()}, "val_dataset Iterable: needs"),
    ]:
        with pytest.raises(UserError, match=message):
            toolkit.train(MODEL, Iterable(), train=TRAIN, out_dir=tmp_path, **options)
