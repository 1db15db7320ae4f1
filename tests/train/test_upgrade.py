"""What kos 0.2.0 wrote goes on: run_of_0_2 is a run that it made, whose config.json and metrics are whole.

The run: --data text.txt --hidden-size 8 --num-hidden-layers 1 --num-attention-heads 1 --num-key-value-heads 1
--intermediate-size 8 --batch-size 4 --seq-len 16 --lr 3e-2 --warmup-steps 1 --schedule constant --eval-every 0
--sample-tokens 0 --log-every 1 --save-every 3 --steps 6 --out run.  Of its checkpoints, that of step 3 is kept.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kos.errors import CheckpointError
from kos.testing import spawn
from kos.train import load, read_metrics
from kos.train.config.flags import parse
from kos.train.run import Trainer

RUN = Path(__file__).with_name("run_of_0_2")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of the run in the current folder, beside its data."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(6000)))
    return Path(shutil.copytree(RUN, "run"))


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, []), (1, ["--eval-batches=0"])], ids=str)
def test_a_run_resumes_with_the_same_losses(run, ranks, more):
    """By the run's own settings; two ranks add in another order.  Without validation, it holds out what it did."""
    losses = [row["loss"] for row in read_metrics(run)]
    config = parse(["--config", "run/config.json", "--resume", "auto", *more])
    spawn(lambda comm: Trainer(config, comm).run(), ranks)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and len(losses) == 6
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-5)
    assert (run / "checkpoints" / "step-6").is_dir()


def test_a_checkpoint_generates(run):
    assert load(run).generate("abc", tokens=4, temperature=0).startswith("abc")


def test_the_error_about_another_model_names_the_file_with_its_settings(run):
    config = parse(["--data", "text.txt", "--resume", "run/checkpoints/step-3", "--out", "other"])
    with pytest.raises(CheckpointError, match="model of this run, .*; to resume it as it was begun: --config run/c"):
        spawn(lambda comm: Trainer(config, comm).run(), 1)
