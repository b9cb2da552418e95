"""The results as a picture. Needs matplotlib."""

from pathlib import Path

_COLOURS = {
    "eager": "#9aa0a6",
    "compiled": "#e8a33d",
    "fast": "#1a73e8",
    "high": "#9334e6",
    "fast + compile": "#8ab4f8",
    "eager as a graph": "#5f6368",
    "fast + graphs": "#174ea6",
    "floor": "#34a853",
}


def draw(document: dict):
    """A matplotlib figure: the arms of forwards and of pipeline calls, and each operation's share of the copy bandwidth.

    Raises:
        ValueError: nothing in `document` was timed.
    """
    from matplotlib.figure import Figure

    forwards = [s for s in document["sections"] if s["section"] not in ("kernels", "pipeline") and s["equal"]]
    pipelines = [s for s in document["sections"] if s["section"] == "pipeline" and s["equal"]]
    kernels = [row for s in document["sections"] if s["section"] == "kernels" for row in s["rows"] if "copy_share" in row]
    heights = [4.0] * (bool(forwards) + bool(pipelines)) + ([1.5 + 0.16 * len(kernels)] if kernels else [])
    if not heights:
        raise ValueError("nothing was timed, so there is nothing to plot")
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    panels = iter(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if forwards:
        _draw_arms(next(panels), forwards, "gpu_ms", "GPU time (ms)")
    if pipelines:
        _draw_arms(next(panels), pipelines, "seconds", "seconds")
    if kernels:
        _draw_kernels(next(panels), kernels)
    gpu = document["environment"]["gpu"]
    figure.suptitle(f"ltx2_fastpath {document['environment']['ltx2_fastpath']} on {gpu}", fontsize=11)
    return figure


def save(document: dict, path: Path) -> None:
    """Write the figure in the format of the file's suffix. Raises ValueError as `draw` does."""
    draw(document).savefig(path, dpi=150)


def _draw_arms(axes, sections, time: str, unit: str) -> None:
    names = [name for name in _COLOURS if any(name in section["arms"] for section in sections)]
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        axes.bar(0, 0, color=_COLOURS[name], label=name)
        for group, section in enumerate(sections):
            if name not in section["arms"]:
                continue
            arm = section["arms"][name]
            x = group + (i - (len(names) - 1) / 2) * width
            bar = axes.bar(x, arm[time], 0.92 * width, color=_COLOURS[name])
            axes.bar_label(bar, [f"{arm[time]:.0f}\n{arm['speed_up']:.2f}x"], fontsize=8, padding=2)
    axes.set_xticks(range(len(sections)), [_label(section) for section in sections])
    axes.set_ylabel(unit)
    axes.margins(y=0.12)
    axes.legend(ncols=len(names), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _label(section) -> str:
    steps = f", {section['steps']} steps" if "steps" in section else ""
    given = ", latents given" if section.get("given_latents") else ""
    return f"{section['section']} {section['clip']}\n{section['video_tokens']} video tokens{steps}{given}"


def _draw_kernels(axes, rows) -> None:
    places = range(len(rows))
    bars = axes.barh(places, [100 * row["copy_share"] for row in rows], color=_COLOURS["fast"])
    axes.bar_label(bars, [f"{row['speed_up']:.1f}x" for row in rows], fontsize=7, padding=2)
    axes.set_yticks(places, [f"{row['operation']}  {row['shape']}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(100, color="#9aa0a6", linewidth=0.8)
    axes.set_xlabel("share of copy bandwidth (%); the label is the speed-up over the eager chain")
    axes.spines[["top", "right"]].set_visible(False)
