"""Examples come out as the files hold them; bad files and missing ones are one clear line."""

import gzip
from importlib import resources

import numpy as np
import pytest
import torch

from thinwire.lab.tasks import datasets
from thinwire.lab.tasks.datasets import Examples


def write_idx(file, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    file.write_bytes(gzip.compress(header + array.tobytes()))


def numbered(count: int, classes: int = 10) -> Examples:
    return Examples(torch.arange(count), torch.arange(count) % classes)


def test_embedded_images_are_balanced_and_small():
    data = datasets.embedded_images()
    assert data.train.inputs.shape == (6000, 1, 28, 28) and data.train.inputs.dtype == torch.uint8
    assert data.train.targets.bincount().tolist() == [600] * 10
    assert data.validation.targets.bincount().tolist() == [200] * 10
    assert data.test.targets.bincount().tolist() == [500] * 10
    assert 50 < data.train.inputs.float().mean() < 100  # pictures, not noise and not black
    folder = resources.files("thinwire.lab.tasks") / "data"
    assert len((folder / "fashion_mnist_subset.npz").read_bytes()) < 6e6
    assert "MIT" in (folder / "LICENSE.fashion-mnist").read_text()


def test_without_a_validation_part_a_tenth_of_the_training_examples_is_kept_from_training():
    train, validation = datasets.Dataset(numbered(1003), numbered(5)).split
    assert len(validation) == 100 and sorted([*train.inputs.tolist(), *validation.inputs.tolist()]) == list(range(1003))
    train, validation = datasets.Dataset(numbered(100_000), numbered(5)).split
    assert len(validation) == 2040 and len(train) == 97_960  # not a tenth: there are enough of them
    given = datasets.Dataset(numbered(100), numbered(5), numbered(7))
    assert given.split[0] is given.train and given.split[1] is given.validation


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_shards_are_disjoint_equal_and_repeatable(skew):
    examples = numbered(1003)
    shards = [examples.shard(worker, 4, seed=3, skew=skew) for worker in range(4)]
    together = torch.cat([shard.inputs for shard in shards])
    assert [len(shard) for shard in shards] == [250] * 4
    assert len(together.unique()) == 1000
    assert torch.equal(shards[2].inputs, examples.shard(2, 4, seed=3, skew=skew).inputs)
    assert not torch.equal(shards[2].inputs, examples.shard(2, 4, seed=4, skew=skew).inputs)


def test_skew_narrows_the_labels_a_worker_sees():
    def commonest_share(skew):
        counts = numbered(4000).shard(0, 4, seed=0, skew=skew).targets.bincount(minlength=10)
        return counts.max().item() / counts.sum().item()

    assert commonest_share(0.0) < 0.15 < commonest_share(0.5) < commonest_share(1.0)
    assert len(numbered(4000).shard(0, 4, seed=0, skew=1.0).targets.unique()) <= 4


def test_skew_needs_one_label_per_example():
    with pytest.raises(ValueError, match="skew"):
        Examples(torch.zeros(100, 4), torch.zeros(100, 4)).shard(0, 2, seed=0, skew=0.5)


def test_parts_together_are_the_whole():
    parts = [numbered(1001).part(worker, 3).inputs for worker in range(3)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1001))


def test_batches_go_through_every_example_in_new_orders():
    batches = numbered(100).batches(25, seed=1)
    first, second = ([next(batches).inputs for _ in range(4)] for _ in range(2))
    assert torch.equal(torch.cat(first).sort().values, torch.arange(100))
    assert torch.equal(torch.cat(second).sort().values, torch.arange(100))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    with pytest.raises(ValueError, match="batch of 101"):
        next(numbered(100).batches(101, seed=0))


def test_fashion_mnist_files(tmp_path):
    images = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for prefix in ("train", "t10k"):
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", np.array([7, 0, 9], np.uint8))
    for place in (folder, tmp_path):  # the folder itself, or the one above it
        data = datasets.fashion_mnist(place)
        assert data.test.inputs[1, 0].numpy().tolist() == images[1].tolist()
        assert data.train.targets.tolist() == [7, 0, 9]
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"missing file: .*t10k-labels"):
        datasets.fashion_mnist(folder)


def test_broken_idx_files(tmp_path):
    file = tmp_path / "x.gz"
    write_idx(file, np.zeros((4, 5), np.uint8))
    whole = file.read_bytes()
    for bad in (b"", b"no gzip", whole[:-12], gzip.compress(b""), gzip.compress(b"\0\0\x08\x02abc")):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"x\.gz"):
            datasets.read_idx(file)


def test_cifar10_files(tmp_path):
    record = np.concatenate([[3], np.repeat([10, 20, 30], 1024)]).astype(np.uint8)
    (tmp_path / "data_batch_1.bin").write_bytes(record.tobytes() * 2)
    (tmp_path / "data_batch_3.bin").write_bytes(record.tobytes())
    with pytest.raises(ValueError, match=r"missing file: .*test_batch"):
        datasets.cifar10(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(record.tobytes())
    data = datasets.cifar10(tmp_path)
    assert data.train.inputs.shape == (3, 3, 32, 32) and data.train.targets.tolist() == [3, 3, 3]
    assert data.test.inputs[0].float().mean((1, 2)).tolist() == [10, 20, 30]
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        datasets.cifar10(tmp_path)


def test_text_windows_predict_the_next_byte_and_hold_out_the_end(tmp_path):
    file = tmp_path / "text.txt"
    text = bytes(range(200)) * 50
    file.write_bytes(text)
    data = datasets.text_bytes(file, context=10)
    assert torch.equal(data.train.targets[:, :-1], data.train.inputs[:, 1:])
    assert len(data.train) * 10 <= 0.91 * len(text)
    assert bytes(data.test.inputs[-1].tolist()) in text[-21:]
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 201"):
        datasets.text_bytes(file, context=10)
    with pytest.raises(ValueError, match="missing file"):
        datasets.text_bytes(tmp_path / "none.txt", context=10)
