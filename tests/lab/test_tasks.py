"""Tasks: what spec text makes, and that there is something to learn."""

import random

import pytest
import torch

from thinwire.lab.tasks import datasets, tasks
from thinwire.lab.tasks.tasks import load_task


def learn(task: tasks.Task, steps: int) -> tuple[float, float]:
    """The score before and after a few steps of one worker."""

    def score() -> float:
        return task.metric.of(model, task.dataset.test[slice(0, 1000)]).mean().item()

    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    batches = task.dataset.train.shard(0, 4, seed=0).batches(task.batch, seed=0)
    before = score()
    for _ in range(steps):
        batch = next(batches)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return before, score()


@pytest.fixture
def text_file(tmp_path):
    words = random.Random(0).choices(["thin ", "wire ", "long ", "train "], k=4000)
    file = tmp_path / "text.txt"
    file.write_text("".join(words))
    return file


@pytest.mark.parametrize("spec, steps", [("mlp(width=128)", 40), ("cnn", 30), ("regression", 60)])
def test_tasks_learn(spec, steps):
    task = load_task(spec)
    before, after = learn(task, steps)
    assert after > before + 0.3 if task.metric.rising else after < 0.3 * before


def test_the_text_task_learns(text_file):
    before, after = learn(load_task("text(width=32)", text_file), 40)
    assert 7 < before < 9 and after < 4.5  # bits per byte; 8 is knowing nothing


def test_model_sizes_are_as_described():
    def weights(spec):
        return sum(p.numel() for p in load_task(spec).model().parameters())

    assert weights("mlp") == 784 * 2048 + 2048 * 2048 + 2048 * 10 + 2048 * 2 + 10
    assert 0.55e6 < weights("cnn") < 0.65e6


def test_the_net_for_cifar10_has_batch_norm_and_learns(monkeypatch, tmp_path):
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (400, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(400) % 2
    pictures[labels == 1, :, :16] //= 3
    examples = datasets.Examples(pictures, labels)
    monkeypatch.setattr(datasets, "cifar10", lambda folder: datasets.Dataset(examples, examples))
    task = load_task("cifar10(width=2)", tmp_path)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in task.model().modules())
    before, after = learn(task, 30)
    assert before < 0.7 < 0.9 < after
    assert 0.175e6 < sum(p.numel() for p in load_task("cifar10", tmp_path).model().parameters()) < 0.185e6


def test_without_a_file_the_text_is_pythons_own_reference():
    task = load_task("text")
    assert b"Assert statements are a convenient way" in bytes(task.dataset.train.inputs.flatten().tolist())


def test_options_of_spec_text():
    task = load_task(" mlp(width=64, target=0.7, steps=9, skew=0.5) ")
    assert (task.target, task.steps, task.skew) == (0.7, 9, 0.5)
    assert task.model()[2].out_features == 64


def test_a_task_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from thinwire.lab.tasks.tasks import load_task\n"
        "def easy(data, *, steps_each=2):\n"
        "    return replace(load_task('regression'), name='easy', steps=steps_each * 3)\n"
        "def wrong(data):\n"
        "    return 7\n"
    )
    assert load_task(f"{file}:easy").steps == 6
    assert load_task(f"{file}:easy(steps_each=5, batch=3)").batch == 3
    with pytest.raises(ValueError, match="returned 7"):
        load_task(f"{file}:wrong")
    with pytest.raises(ValueError, match="known: easy, wrong"):
        load_task(f"{file}:other")
    with pytest.raises(ValueError, match="missing file"):
        load_task(f"{tmp_path}/none.py:easy")


@pytest.mark.parametrize(
    "spec, said",
    [
        ("nothing", "unknown task 'nothing'; known: mlp, cnn"),
        ("mlp(depth=3)", "no option 'depth'; known: width"),
        ("mlp(width=open('x'))", "plain value"),
        ("mlp(2048)", "cannot read"),
        ("mlp(", "cannot read"),
        ("mlp(skew=2)", "skew must be within 0..1"),
        ("mlp(steps=0)", "steps must be at least 1"),
        ("mlp(steps='x')", "steps"),
        ("fashion", "--data"),
        ("cifar10", "--data"),
    ],
)
def test_mistakes_are_one_line(spec, said):
    with pytest.raises(ValueError) as caught:
        load_task(spec)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_model_is_evaluated_regularly_and_at_the_end():
    often, usual = load_task("mlp(evaluate_every=4)"), load_task("mlp")
    assert [step for step in range(1, 11) if often.evaluates(step, 10)] == [4, 8, 10]
    assert sum(usual.evaluates(step, 60) for step in range(1, 61)) == tasks.EVALUATIONS
    assert all(usual.evaluates(step, 3) for step in range(1, 4))
