from matplotlib.colors import to_rgb
from matplotlib.image import imread

from roles.plot import MARKS, plot_rows, scale


def test_a_run_that_learns_nothing_is_drawn_on_the_scale_of_one_that_does():
    assert scale(0.0, 0.03) == scale(-0.05, 1.05) == (-0.02, 1.02, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert scale(-3.2, 1.7) == (-3.2, 1.7, [-3.0, -2.0, -1.0, 0.0, 1.0])


def test_what_happened_to_peers_is_marked_in_its_colour(tmp_path):
    rewards = [{"step": step, "reward": 0.01} for step in range(1, 41)]

    def pixels(kind: str, *events: dict) -> int:
        picture = imread(plot_rows([*rewards, *events], tmp_path / "reward.png", "run"))[:, :, :3]
        return int((abs(picture - to_rgb(MARKS[kind])).max(axis=2) < 0.02).sum())

    for kind in MARKS:
        marked = pixels(kind, {"step": 20, "event": kind, "text": f"rollout-1 {kind}"})
        assert marked > pixels(kind) + 200, kind  # a line from top to bottom; grey is also at the rim of letters
