"""The controller does what policies, requests and limits ask for."""

from __future__ import annotations

import numpy as np
import pytest

from autospec.config import parse_settings
from autospec.controller import Controller
from autospec.errors import ConfigError
from autospec.profile.tuned import KCap
from autospec.records import BatchState, ProposerInfo, Request, StepResult
from tests.controller.serving import DEAR_TOKENS, serve
from tests.simulated_engine import ENGINE, PROMPT, Clock, linear_seconds, lookup, model


@pytest.mark.parametrize("policy", ["{name: static, proposer: draft, k: 3}", "{name: 'off'}"])
def test_static_policies_are_obeyed(policy: str) -> None:
    """No probes and no guard, however bad it is."""
    engine = serve(
        [lookup(hazard=0.0), model(hazard=0.0, depth_seconds=0.1)],
        DEAR_TOKENS,
        yaml=f"policy: {policy}",
        requests=3,
    )
    engine.run(300)
    wanted = 3 if "static" in policy else 0
    assert {plan.mode for plan in engine.plans} == {"speculate" if wanted else "plain"}
    assert all((plan.k == wanted).all() for plan in engine.plans)


def test_opting_out_and_capping_one_request() -> None:
    engine = serve([lookup(hazard=0.95)], requests=0)
    engine.start(max_k=0)
    engine.start(max_k=3)
    engine.start()
    engine.start(max_k=-5)
    engine.start(max_k=10**9)
    engine.run(200)
    k = np.array([plan.k for plan in engine.plans])
    assert k.max(axis=0).tolist() == [0, 3, 8, 0, 8]


def test_the_policy_files_cap_holds_for_every_request() -> None:
    engine = serve([lookup(hazard=0.95)], yaml="max_k: 2", requests=0)
    engine.start(max_k=7)
    engine.run(100)
    assert max(plan.k[0] for plan in engine.plans) == 2


def test_tuned_caps_hold_from_their_load_on() -> None:
    controller = Controller(
        parse_settings("version: 1\npolicy: {name: static, proposer: draft, k: 6}"),
        [model(max_k=6).info],
        ENGINE,
        caps=(KCap(load=9, k=2), KCap(load=3, k=4)),
    )
    handles = np.array([controller.start(Request(str(i), PROMPT)) for i in range(9)])
    found = [
        controller.plan(BatchState(handles[:n], np.full(n, 10, dtype=np.int32))).k.tolist()
        for n in (2, 3, 8, 9)
    ]
    assert found == [[6] * 2, [4] * 3, [4] * 8, [2] * 9]


def test_only_allowed_proposers_draft() -> None:
    drafters = [lookup("ngram", 0.9), lookup("suffix", 0.9), model("draft", 0.9)]
    engine = serve(drafters, yaml="proposers: [suffix]")
    engine.run(200)
    used = set(np.concatenate([plan.proposer for plan in engine.plans]).tolist())
    assert used == {-1, 1} or used == {1}
    assert engine.controller.wants_offers().tolist() == [False, True, False]


def test_a_proposer_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'sufix' is not a proposer of this engine"):
        serve([lookup("suffix")], yaml="proposers: [sufix]")
    with pytest.raises(ConfigError, match="every name must differ"):
        serve([lookup("suffix"), lookup("suffix")])


def test_room_is_respected() -> None:
    engine = serve([lookup(hazard=0.95)], requests=3)
    for _ in range(100):
        plan, _ = engine.step(room=np.array([0, 2, 100], dtype=np.int16))
        assert (plan.k <= [0, 2, 100]).all()
    assert plan.k[2] > 2


def test_trim_verifies_no_more_than_was_drafted() -> None:
    controller = serve([model(hazard=0.9)], yaml="policy: {name: static, proposer: draft, k: 5}")
    handles = np.array(controller.handles, dtype=np.int64)
    plan = controller.controller.plan(BatchState(handles, np.array([10], dtype=np.int32)))
    for drafted, verified in ((3, 3), (0, 0), (9, 5), (-2, 0)):
        trimmed = controller.controller.trim(plan, np.array([drafted], dtype=np.int16), None)
        assert trimmed.verify.tolist() == [verified]
        assert trimmed.id == plan.id
        assert plan.verify.tolist() == [5]


def test_trim_learns_which_draft_confidences_come_true() -> None:
    """A model that is unsure of its token is right to be: those drafts are not verified."""
    clock = Clock()
    info = ProposerInfo("draft", "sequential", 4)
    controller = Controller(parse_settings("version: 1"), [info], ENGINE, clock=clock)
    rng = np.random.default_rng(0)
    handle = np.array([controller.start(Request("r", PROMPT))])
    kept: dict[bool, list[int]] = {True: [], False: []}
    for step in range(1500):
        plan = controller.plan(BatchState(handle, np.array([100], dtype=np.int32)))
        sure = bool(rng.random() < 0.6)
        confidence = np.full((1, 4), 0.95 if sure else 0.15, dtype=np.float32)
        plan = controller.trim(plan, plan.k, confidence)
        right = 4 if sure else 0
        accepted = np.minimum(plan.verify, right).astype(np.int16)
        if step > 500 and plan.mode == "speculate" and plan.k[0]:
            kept[sure].append(int(plan.verify[0] == plan.k[0]))
        seconds = 0.005 + 0.01 * (1 + int(plan.verify.sum())) + 0.0005 * int(plan.k.max())
        controller.observe(
            plan, StepResult(plan.verify, accepted, (accepted + 1).astype(np.int16), seconds)
        )
    assert np.mean(kept[True]) > 0.9
    assert np.mean(kept[False]) < 0.3


def test_slo_targets_shift_drafts_to_requests_that_are_late() -> None:
    engine = serve(
        [lookup(hazard=0.7)],
        linear_seconds(0.02, 0.008),
        yaml="policy: {name: goodput, objective: slo}",
        requests=0,
    )
    engine.start(tpot_target_seconds=0.001)  # cannot be met
    engine.start(tpot_target_seconds=10.0)
    engine.start()
    engine.run(300)
    late, early, without = np.mean([plan.k for plan in engine.plans[-200:]], axis=0)
    assert late > early + 0.5
    assert early <= without + 0.3  # far ahead of its target, it makes way
