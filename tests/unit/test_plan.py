"""The kill and the join that ``mesh up`` plans."""

from mesh.plan import Plan, victim


def test_the_kill_comes_once_at_its_step():
    plan = Plan(200, 0.33, 0.0)
    plan.see(65, 1.0)
    assert not plan.kill_now()
    plan.see(66, 2.0)
    assert plan.kill_now()
    assert not plan.kill_now()


def test_a_rollout_is_started_so_early_that_it_joins_at_its_step():
    plan = Plan(200, 0.0, 0.66)
    for second in range(20):
        plan.see(4 * second, float(second))  # 4 steps a second
        assert not plan.add_now(start_s=12.0)
    plan.see(80, 20.0)
    assert not plan.add_now(start_s=12.0)  # it would join at step 128
    plan.see(84, 21.0)
    assert plan.add_now(start_s=12.0)  # at 132
    assert not plan.add_now(start_s=12.0)


def test_nothing_is_planned_before_the_first_step_or_without_being_asked():
    plan = Plan(200, 0.0, 0.66)
    plan.see(0, 0.0)
    assert not plan.add_now(start_s=1e9)
    plan = Plan(200, 0.0, 0.0)
    plan.see(200, 1.0)
    assert not plan.kill_now()
    assert not plan.add_now(start_s=1.0)


def test_a_rollout_that_works_is_killed_not_one_that_still_starts():
    assert victim(["r0", "r1", "r2"], {"r0", "r1"}) == "r1"
    assert victim(["r0"], {"r0", "r1"}) == "r0"
    assert victim(["r2"], {"r0"}) is None
