"""Sections as plain text: aligned columns, first what was measured, then a line per arm or operation."""


def section_text(section: dict) -> str:
    """The table of one section."""
    return _kernels(section) if section["section"] == "kernels" else _forwards(section)


def align(rows: list[list[str]], left: int = 1) -> str:
    """`rows` in columns two spaces apart; the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(row):
        cells = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def _kernels(section: dict) -> str:
    head = f"kernels: {section['dtype']}, L2 cold; a large copy moves {section['copy_gb_s']:.0f} GB/s"
    names = "operation, batch x tokens x width, bits, eager µs, fused µs, speed-up, GB/s, of copy, eager host µs, fused host µs"
    rows = [names.split(", ")]
    notes = []
    for row in section["rows"]:
        bits = {True: "equal", False: "DIFFER", None: "-"}[row["equal"]]
        cells = [row["operation"], row["shape"], bits]
        if "speed_up" in row:
            eager, fused = row["eager"], row["fused"]
            cells += [
                f"{1e3 * eager['gpu_ms']:.1f}",
                f"{1e3 * fused['gpu_ms']:.1f}",
                f"{row['speed_up']:.2f}x",
                f"{row['gb_s']:.0f}",
                f"{100 * row['copy_share']:.0f} %",
                f"{1e3 * eager['host_ms']:.0f}",
                f"{1e3 * fused['host_ms']:.0f}",
            ]
        else:
            cells += [""] * 7
            notes.append(f"{row['operation']}, {row['shape']}: not timed: {row['note']}")
        rows.append(cells)
    return "\n".join([head, align(rows, left=3), *notes])


def _forwards(section: dict) -> str:
    passes = ", ".join(f"{guidance} of {rows}" for guidance, rows in section["passes"].items())
    kind = "image to video" if section["image_to_video"] else "text to video"
    model = f"LTX-{section['version']}, {section['layers']} layers, {section['dtype']}, {kind}"
    tokens = f"{section['video_tokens']} video and {section['audio_tokens']} audio tokens, rows: {passes}"
    lines = [f"{section['section']} {section['clip']}: {model}, {tokens}", *section["notes"]]
    if not section["equal"]:
        unequal = [name for name, same in section["arms"]["fast"]["equal"].items() if not same]
        return "\n".join([*lines, f"NOT EQUAL, so not timed: fast differs from eager in {', '.join(unequal)}"])
    names = (
        "arm, GPU ms, speed-up, x floor, host ms, kernels, memsets, copies, matrix ms, attention ms, rest ms, peak GiB, first s,"
        " max difference"
    )
    rows = [names.split(", ")]
    for name, arm in section["arms"].items():
        split, counts = arm["split_ms"], arm["launches"]
        rows.append(
            [
                name,
                f"{arm['gpu_ms']:.1f}",
                f"{arm['speed_up']:.2f}x",
                f"{arm['times_floor']:.3f}" if "times_floor" in arm else "-",
                f"{arm['host_ms']:.1f}",
                str(counts["kernels"]),
                str(counts["memsets"]),
                str(counts["copies"]),
                *(f"{milliseconds:.1f}" for milliseconds in split.values()),
                f"{arm['peak_bytes'] / 2**30:.1f}",
                f"{arm['first_call_s']:.1f}",
                _difference(arm),
            ]
        )
    return "\n".join([*lines, align(rows)])


def _difference(arm: dict) -> str:
    if "equal" not in arm:
        return "-"
    if all(arm["equal"].values()):
        return "bit-equal"
    return f"{max(arm['max_abs_difference'].values()):.2g}"
