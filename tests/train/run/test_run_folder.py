"""What a run does not begin in and not go on from: folders of others or of nothing, another recipe, other rows."""

import json
import shutil

import pytest

from headstart.train.run.checkpointing import describe_rows_per_step, list_checkpoints


def test_folder_that_was_hardly_begun_is_as_good_as_none(trainer, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.partial-01234567").write_text("target: hal")
    with pytest.raises(ValueError, match=r"there is no run in .* leave --resume out"):
        trainer.main(max_steps=2, resume=True)
    trainer.run(max_steps=2)
    assert not (tmp_path / "run" / ".config.yaml.partial-01234567").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoint_of_one_run_does_not_overwrite_another(trainer, tmp_path, resume):
    for name in ("one", "other"):
        trainer.run(max_steps=2, checkpoint_every=2, output=tmp_path / name)
    other = tmp_path / "other"
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    checkpoint = tmp_path / "one" / "checkpoints" / "step-000002"
    with pytest.raises(ValueError, match=r"other' already holds .* would overwrite: name a new output"):
        trainer.main(max_steps=4, output=other, resume_from=checkpoint, resume=resume)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    trainer.run(max_steps=4, output=tmp_path / "new", resume_from=checkpoint)


def test_folder_without_a_checkpoint_is_not_started_over(trainer, tmp_path):
    trainer.run(max_steps=2)
    folder = tmp_path / "run"
    shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds a finished head/ and no checkpoint.*name a new output"):
        trainer.main(max_steps=2, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    shutil.rmtree(folder / "head")
    (folder / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"neither a checkpoint nor a config\.yaml"):
        trainer.main(max_steps=2, resume=True)


def test_existing_run_folder_is_left_alone(trainer, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes.txt: add --resume"):
        trainer.main()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match=r"is a file: name a new run folder"):
        trainer.main(output=folder / "notes.txt")


def test_folder_of_a_run_that_never_began_is_taken(trainer, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("target: one that was refused\n")
    trainer.run(max_steps=1)
    assert (tmp_path / "run" / "head").is_dir()


def test_processes_that_do_not_know_of_each_other_are_refused(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were launched, and accelerate runs each of them alone"):
        trainer.main()
    assert not (tmp_path / "run").exists()


def test_nothing_to_resume_is_an_error(trainer, tmp_path):
    with pytest.raises(ValueError, match=r"there is no run in .* to resume"):
        trainer.main(resume=True)
    with pytest.raises(ValueError, match="there is no such checkpoint folder"):
        trainer.main(resume_from=tmp_path / "step-000002")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("num_heads", 2), ("seed", 3), ("autocast", "bf16")])
def test_resumed_run_keeps_its_recipe(trainer, name, value):
    trainer.run(max_steps=2)
    with pytest.raises(ValueError, match=f"started with {name} .*, not {value!r}"):
        trainer.main(max_steps=4, resume=True, **{name: value})


def test_a_run_does_not_end_before_where_it_is(trainer, tmp_path):
    """And nothing of it is written anew: the same command without the key goes on."""
    trainer.run(max_steps=4)
    before = (tmp_path / "run" / "config.yaml").read_text()
    for keys in ({"max_steps": 3}, {"max_steps": 0, "num_epochs": 0.05}):
        with pytest.raises(ValueError, match=r"is at step 4, beyond the run's [13]: set max_steps to 4"):
            trainer.main(resume=True, **keys)
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    trainer.run(max_steps=4, resume=True)


def test_a_key_that_the_checkpoint_does_not_know_counts_as_its_default(trainer, tmp_path):
    trainer.run(max_steps=2)
    state = list_checkpoints(tmp_path / "run")[-1] / "state.json"
    found = json.loads(state.read_text())
    del found["recipe"]["weight_decay"]
    state.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"started with weight_decay 0\.0, not 0\.1"):
        trainer.main(max_steps=3, resume=True, weight_decay=0.1)
    trainer.run(max_steps=3, resume=True)


def test_checkpoint_whose_lk_followed_no_rates_is_refused(trainer, tmp_path):
    trainer.run(max_steps=2, loss="lk")
    state = list_checkpoints(tmp_path / "run")[-1] / "state.json"
    found = json.loads(state.read_text())
    del found["rates"]
    state.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="another version, whose lk did not follow the mean rate of acceptance"):
        trainer.main(max_steps=4, resume=True, loss="lk")


def test_resumed_run_keeps_its_rows_per_step_and_says_how(trainer):
    trainer.run(max_steps=2, batch_rows=4, accumulate=3)
    for keys, advice in (
        ({"batch_rows": 2}, "set accumulate to 6"),
        ({"accumulate": 4}, "set accumulate to 3"),
        ({"batch_rows": 5}, "set batch_rows and accumulate so that their product is 12"),
    ):
        with pytest.raises(
            ValueError, match=rf"with 12 rows per optimiser step, now .* x 1 processes make \d+,.*: {advice}"
        ):
            trainer.main(max_steps=4, resume=True, **({"batch_rows": 4, "accumulate": 3} | keys))


def test_advice_counts_the_processes():
    recipe = {"batch_rows": 4, "accumulate": 2}
    assert "set accumulate to 4" in describe_rows_per_step(64, 32, recipe)  # 4 processes
    assert "their product is 3" in describe_rows_per_step(12, 32, recipe)
    assert "a number of processes that divides 62" in describe_rows_per_step(62, 32, recipe)


def test_resumed_run_needs_the_same_data(trainer, conversations, tmp_path):
    data = tmp_path / "data.jsonl"
    shutil.copy(conversations, data)
    trainer.run(max_steps=2, data=data)
    data.write_text("\n".join(data.read_text().splitlines()[:-5]))
    with pytest.raises(ValueError, match="the data gives other rows"):
        trainer.main(max_steps=4, data=data, resume=True)
