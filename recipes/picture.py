"""Draws docs/cocod.svg: what CoCoD-SGD does to the weights of two workers, computed from its update rule.

python recipes/picture.py
"""

from pathlib import Path

STEPS, K, RATE = 16, 4, 0.13
OPTIMA, START = (1.0, -0.35), -1.0  # each worker's data pulls towards another optimum
LEFT, TOP, WIDTH, HEIGHT = 120, 40, 640, 200
BLUE, RED, GREY, GREEN = "#1f6fb4", "#c8502d", "#6b7280", "#3a8a4d"


def trajectories():
    """Weights of both workers after every step, with the jumps of the merges as points of their own."""
    x, snapshot = [START, START], [START, START]
    paths = [[(0, START)], [(0, START)]]
    for t in range(STEPS + 1):
        if t and t % K == 0:
            mean = sum(snapshot) / 2
            x = [x[i] + mean - snapshot[i] for i in (0, 1)]
            snapshot = list(x)
            for i in (0, 1):
                paths[i].append((t, x[i]))
        if t < STEPS:
            x = [x[i] - RATE * (x[i] - OPTIMA[i]) for i in (0, 1)]
            for i in (0, 1):
                paths[i].append((t + 1, x[i]))
    return paths


def draw():
    low, high = -1.05, 0.55

    def px(t):
        return LEFT + WIDTH * t / STEPS

    def py(x):
        return TOP + HEIGHT * (high - x) / (high - low)

    def text(x, y, words, colour=GREY, anchor="start"):
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'

    lane = TOP + HEIGHT + 34
    parts = [text(LEFT, 22, "weights of two workers (k = 4)"), text(LEFT - 12, lane + 16, "compute", anchor="end")]
    parts.append(text(LEFT - 12, lane + 44, "network", anchor="end"))
    for t in range(0, STEPS + 1, K):
        parts.append(
            f'<line x1="{px(t)}" y1="{TOP}" x2="{px(t)}" y2="{lane + 54}" stroke="#d1d5db" stroke-dasharray="3 4"/>'
        )
    for t in range(STEPS):
        parts.append(
            f'<rect x="{px(t) + 1}" y="{lane}" width="{WIDTH / STEPS - 2}" height="22" fill="#e5edf5" stroke="{BLUE}"/>'
        )
        parts.append(text(px(t + 0.5), lane + 15, f"{t}", BLUE, "middle"))
    for t in range(0, STEPS, K):
        transfer = px(K - 0.7) - px(0)
        parts.append(
            f'<rect x="{px(t) + 1}" y="{lane + 29}" width="{transfer}" height="22" fill="#e7f2e9" stroke="{GREEN}"/>'
        )
        parts.append(text(px(t + (K - 0.7) / 2), lane + 44, f"mean of S({t})", GREEN, "middle"))
    for path, colour, name in zip(trajectories(), (BLUE, RED), ("worker 1", "worker 2"), strict=True):
        points = " ".join(f"{px(t):.1f},{py(x):.1f}" for t, x in path)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px(t):.1f}" cy="{py(x):.1f}" r="2.6" fill="{colour}"/>' for t, x in path]
        parts.append(text(px(STEPS) + 8, py(path[-1][1]) + 4, name, colour))
    parts.append(text(px(2 * K) + 8, TOP + HEIGHT - 4, "x += A − S: the mean of step 4 arrives at step 8,"))
    parts.append(text(px(2 * K) + 8, TOP + HEIGHT + 12, "and steps 4 to 7 of both workers stay in"))
    box = f'viewBox="0 0 {LEFT + WIDTH + 90} {lane + 66}" font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "docs" / "cocod.svg"
    target.write_text(draw())
    print(target)
