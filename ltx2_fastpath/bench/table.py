"""Sections as plain text: aligned columns, first what was measured, then a line per arm or operation."""

from ltx2_fastpath.console import align


def section_text(section: dict) -> str:
    """The table of one section."""
    return {"kernels": _kernels, "pipeline": _pipeline}.get(section["section"], _forwards)(section)


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


def _head(section: dict, *more: str) -> list[str]:
    """What was measured, the notes, and what differs where it must not."""
    passes = ", ".join(f"{guidance} of {rows}" for guidance, rows in section["passes"].items())
    kind = "image to video" if section["image_to_video"] else "text to video"
    kind += ", latents given" if section.get("given_latents") else ""
    model = f"LTX-{section['version']}, {section['layers']} layers, {section['dtype']}, {kind}"
    tokens = f"{section['video_tokens']} video and {section['audio_tokens']} audio tokens, rows: {passes}"
    title = f"{section['section']} {section['clip']}" + (f" ({section['setup']})" if "setup" in section else "")
    lines = [", ".join([f"{title}: {model}", tokens, *more]), *section["notes"]]
    if not section["equal"]:
        unequal = [name for name, same in section["arms"]["fast"]["equal"].items() if not same]
        lines.append(f"NOT EQUAL, so not timed: fast differs from eager in {', '.join(unequal)}")
    return lines


def _forwards(section: dict) -> str:
    if not section["arms"]:
        return f"{section['section']} ({section['setup']}): {', '.join(section['notes'])}"
    lines = _head(section)
    if not section["equal"]:
        return "\n".join(lines)
    names = (
        "arm, GPU ms, speed-up, x floor, host ms, waits, kernels, memsets, copies, matrix ms, attention ms, rest ms,"
        " peak GiB, first s, max difference"
    )
    high = "high" in section["arms"]
    rows = [names.split(", ") + ["over fast"] * high]
    for name, arm in section["arms"].items():
        split, counts = arm["split_ms"], arm["launches"]
        rows.append(
            [
                name,
                f"{arm['gpu_ms']:.1f}",
                f"{arm['speed_up']:.2f}x",
                f"{arm['times_floor']:.3f}" if "times_floor" in arm else "-",
                f"{arm['host_ms']:.1f}",
                str(arm["synchronisations"]),
                str(counts["kernels"]),
                str(counts["memsets"]),
                str(counts["copies"]),
                *(f"{milliseconds:.1f}" for milliseconds in split.values()),
                f"{arm['peak_bytes'] / 2**30:.1f}",
                f"{arm['first_call_s']:.1f}",
                _difference(arm),
                *[f"{arm['over_fast']:.2f}x" if "over_fast" in arm else "-"] * high,
            ]
        )
    missed = {**section.get("stock_calls", {}), **section.get("partly", {})}
    return "\n".join([*lines, align(rows), *(f"not fast: {text} ({calls} calls)" for text, calls in missed.items())])


def _pipeline(section: dict) -> str:
    steps = section["steps"]
    lines = _head(section, f"{section['text_tokens']} text tokens", f"{steps} steps")
    if not section["equal"]:
        return "\n".join(lines)
    names = "arm, seconds, speed-up, s a step, STG prefixes reused, peak GiB, max difference, PSNR video/audio"
    rows = [names.split(", ")]
    for name, arm in section["arms"].items():
        rows.append(
            [
                name,
                f"{arm['seconds']:.2f}",
                f"{arm['speed_up']:.2f}x",
                f"{arm['seconds'] / steps:.3f}",
                f"{arm['prefixes_reused']} of {steps}" if "prefixes_reused" in arm else "-",
                f"{arm['peak_bytes'] / 2**30:.1f}",
                _difference(arm),
                _psnr(arm["psnr_db"]) if "psnr_db" in arm else "-",
            ]
        )
    return "\n".join([*lines, align(rows)])


def _psnr(decibels: dict[str, float | None]) -> str:
    return "/".join("equal" if value is None else f"{value:.1f}" for value in decibels.values()) + " dB"


def _difference(arm: dict) -> str:
    if "equal" not in arm:
        return "-"
    if all(arm["equal"].values()):
        return "bit-equal"
    return f"{max(arm['max_abs_difference'].values()):.2g}"
