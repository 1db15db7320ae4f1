"""Update rules: runs, checkpoints, ZeRO-1 and plans know of a rule's state what it says.

Each optimizer of the settings has a rule whose kernel does what it does on a host, a cost, and options of its own.
"""

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.config import OPTIMIZERS, flag_of, not_of
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.device.costs import Clock, TimedOps, cost
from kos.train.device.dry_run import DryRun
from kos.train.ops.cuda import KERNELS
from kos.train.ops.parameters import Parameters
from kos.train.optim import CHUNK, Group, MatrixRule, Optimizer, UpdateRule
from kos.train.parallel.mesh import Layout
from kos.train.tools.plan import make_job
from tests.train.dry_runs import SHAPE as PLANNED
from tests.train.dry_runs import SLOW as SLOW_RATES
from tests.train.host_kernels import emulator
from tests.train.host_kernels.ops import needs_compiler
from tests.train.models import small
from tests.train.refusal import refused
from tests.train.updates import check_updates, each_kind, step_of_host


class Momentum(UpdateRule):
    """SGD with momentum, whose weight decay is a part of the gradient."""

    state, about = {"momentum": "float32"}, "the momentum"

    def step(self, number: int, lr: float, decay: float) -> Callable[..., None]:
        def update(w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray) -> None:
            (m,) = state
            m *= 0.9
            m += g
            m += np.multiply(w, decay, out=out)
            w -= np.multiply(m, lr, out=out)

        return update


def test_a_rule_has_weights_and_their_decay(rng):
    shapes, decay_of = {"a": (3, CHUNK // 2 + 3), "b": (5,)}, {"a": 0.1, "b": 0.0}
    weights, gradients = Parameters(shapes, np.float64), Parameters(shapes, np.float64)
    optimizer = Optimizer(Momentum(), weights, groups=[Group(["a"], 0.1), Group(["b"])])
    weights.flat[:] = rng.normal(size=weights.flat.size)
    expected, momenta = {name: weights[name].copy() for name in shapes}, dict.fromkeys(shapes, 0.0)
    for _ in range(3):
        gradients.flat[:] = rng.normal(size=weights.flat.size)
        for name, w in expected.items():
            momenta[name] = 0.9 * momenta[name] + 0.5 * gradients[name] + decay_of[name] * w
            expected[name] = w - 0.2 * momenta[name]
        step_of_host(optimizer, gradients, 0.2, 0.5)
    for name in shapes:
        np.testing.assert_allclose(weights[name], expected[name], rtol=1e-12, err_msg=name)


# --- those of the settings ---------------------------------------------------------------------------

each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def rule_of(name: str) -> UpdateRule:
    return TrainConfig.from_preset(optimizer=name).update_rule()


def test_every_optimizer_can_be_asked_for():
    assert get_args(TrainConfig.model_fields["optimizer"].annotation) == tuple(OPTIMIZERS)
    with refused(ConfigError, "--optimizer: expected", "got 'sign'"):
        parse(["--optimizer", "sign", "--momentum", "0.5"])


@each_optimizer
def test_its_options(name):
    """Those of its rules are taken, those of other optimizers refused by name."""
    groups = TrainConfig.from_preset(optimizer=name).trained_groups(small())
    rules = [rule_of(name), *(group.rule for group in groups if group.rule)]
    assert set(OPTIMIZERS[name].options) == {option for rule in rules for option in rule.options}
    for option in OPTIMIZERS[name].options:
        assert getattr(parse(["--optimizer", name, flag_of(option), "0.5"]), option) == 0.5
    for option in not_of(name):
        for value in {"0.5", str(TrainConfig.model_fields[option].default)} - {"None"}:
            with refused(ConfigError, f"{flag_of(option)}: expected none with --optimizer {name}, got {value}"):
                parse(["--optimizer", name, flag_of(option), value])
        with refused(ConfigError, f"argument: {option}: expected none with --optimizer {name}, got 0.5"):
            TrainConfig.from_preset(optimizer=name, **{option: 0.5})


@each_optimizer
def test_its_groups_have_all_tensors(name):
    model = small()
    groups = TrainConfig.from_preset(optimizer=name).trained_groups(model)
    assert sorted(tensor for group in groups for tensor in group.names) == sorted(model.parameter_shapes())
    for group in groups:
        if group.rule:
            assert isinstance(group.rule, MatrixRule) and (KERNELS / f"{group.rule.kernel}.cu").exists()


@needs_compiler
@each_kind
def test_its_kernel_is_the_hosts_update(monkeypatch, rng, name, master, copy, gradient, kind):
    """And ``--profile`` knows the bytes of the kernel that updates all but matrices."""
    emulator.host_memory(monkeypatch)
    costs = []

    def timed(name, function):
        def run(*arguments, **options):
            if name == "update":
                costs.append(cost(name, arguments))
            return function(*arguments, **options)

        return run

    ours = check_updates(TimedOps(emulator.HostOps(), timed), rng, name, master, copy, gradient, kind)
    widths = [np.dtype(ours.weights.flat.dtype.numpy).itemsize, 2 if gradient == "bfloat16" else 4]
    each = 2 * (widths[0] + ours.rule.state_bytes()) + widths[1] + (0 if copy is None else 2)
    count = ours.state[next(iter(ours.rule.state))].flat.size
    assert costs == [(each * count, 0.0)] * (ours.step_count + 1)


@each_optimizer
def test_plans_count_its_state_and_its_work(name, before_call):
    moved = []
    before_call(Clock, "operate", lambda clock, name, nbytes, flops: moved.extend([nbytes] * (name == "update")))
    config = parse([*PLANNED, "--optimizer", name])
    run = DryRun.timed(make_job(config, config.model_config_for(256), Layout(), SLOW_RATES), 0)
    model, rule = config.model_config_for(256), rule_of(name)
    sizes = {tensor: int(np.prod(shape)) for tensor, shape in model.parameter_shapes().items()}
    groups = config.trained_groups(model)
    rules = [(group.rule or rule, sum(sizes[tensor] for tensor in group.names)) for group in groups]
    assert sum(moved) == sum(count * (3 * 4 + 2 * each.state_bytes()) for each, count in rules)
    assert sum(moved) <= run.clock.spent["seconds"] * SLOW_RATES.memory
