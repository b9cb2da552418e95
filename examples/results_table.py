"""Write the results from the JSON files in examples/results: a picture, a summary in docs/, and all of it beside the files.

    python examples/results_table.py           write them
    python examples/results_table.py --check   exit with 1 if they are not what the files say

Only runs that finished are shown, and of each only what that run measured: times of different runs are never compared.
"""

import argparse
import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
RESULTS = EXAMPLES / "results"
DOCS = EXAMPLES.parent / "docs"
BEGIN, END = "<!-- results: written by `make results`, do not edit -->", "<!-- end of results -->"
NONE = "No results are committed yet: run `make bench` on a GPU."
SCHEMA = 1
#: Kernel rows are summed up over the shapes with at least so many rows; the JSON has every shape.
LARGE = 6144
#: What the summary shows: a table for each kind of section, a column for each of these arms that it has.
SECTIONS = {"forward": "forward", "step": "guided step", "pipeline": "call", "small": "forward"}
SUMMARY_ARMS = ("eager", "eager as a graph", "compiled", "fast", "high", "fast + compile", "fast + graphs", "floor")
#: Operations of committed runs that the product does not have any more.
REMOVED = {"GELU"}
#: Of the benchmark's command line, as a JSON file has them.
DEFAULTS = {
    "version": "2.3",
    "batch_size": 1,
    "guidance": "cfg",
    "arms": ["eager", "fast", "compiled", "fast + compile", "floor"],
}
#: What comes between the summary and the table under it.
SPENT = """## Where stock spends a forward

For comparison with your own: kernel times of the stock arms above in milliseconds, from a profile of one call each. *All the
rest* is what the fast path works on; launches are kernels, memsets and copies."""
#: The arms in the picture.
DRAWN = {"eager": "stock", "compiled": "compiled", "fast": "ltx2_fastpath", "floor": "floor"}
CAPTIONS = (
    "Shorter is faster. Compiled: compile_repeated_blocks, whose bits are not those of stock.",
    "Floor: the same matrix products and attention alone. With latents given, passes share some.",
)
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .note { font-size: 12px; fill: #59636e }
.eager { fill: #8c959f } .compiled { fill: #d4881c } .fast { fill: #0969da } .floor { fill: #2da44e }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .note { fill: #9198a1 }
.eager { fill: #7d8590 } .compiled { fill: #d29922 } .fast { fill: #4493f8 } .floor { fill: #3fb950 }
}
"""
ARMS = {
    "eager": "stock",
    "compiled": "compiled",
    "fast": "fast path",
    "high": "high",
    "fast + compile": "compiled + fast path",
    "eager as a graph": "stock as one CUDA graph",
    "fast + graphs": "fast path, cuda_graphs=True",
    "floor": "floor",
}


def documents(folder: Path = RESULTS) -> dict[str, dict]:
    """The finished benchmark runs in `folder` by file name. Other JSON files there are left alone.

    Raises ValueError for a run of another schema than this file knows.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or "sections" not in document or not document.get("complete"):
            continue
        if document["schema"] != SCHEMA:
            raise ValueError(f"{path.name} has schema {document['schema']}, expected {SCHEMA}")
        found[path.name] = document
    return found


def summary(found: dict[str, dict]) -> str:
    """What the runs say of whole forwards, steps and calls, as Markdown: for each machine, a table for each kind of these."""
    parts = []
    for machine, sections in _by_machine(found).items():
        kinds = [[section for section in sections if section["section"] == kind] for kind in SECTIONS]
        if any(kinds):
            parts += [f"{machine}:", *map(_overview, filter(None, kinds))]
    return "\n\n".join(parts) or NONE


def _by_machine(found: dict[str, dict]) -> dict[str, list[dict]]:
    machines: dict[str, list[dict]] = {}
    for document in found.values():
        machines.setdefault(_machine(document["environment"]), []).extend(document["sections"])
    return machines


def _overview(sections: list[dict]) -> str:
    arms = [name for name in SUMMARY_ARMS if any(name in section["arms"] for section in sections)]
    rows = [["LTX", "what", "clip (tokens)", *(ARMS[name] for name in arms)]]
    for section in sections:
        model, clip = _model_and_clip(section)
        rows.append([model, _what(section), clip, *(_time(name, section["arms"].get(name)) for name in arms)])
    return markdown(rows, left=3)


def _what(section: dict) -> str:
    what = SECTIONS[section["section"]]
    if "steps" in section:
        return f"{section['steps']}-step {what}, to the latents"
    if section["passes"].keys() == {"cfg"} and section["passes"]["cfg"] > 1:
        what += f", {section['passes']['cfg']} rows"
    return what


def where_stock_spends(found: dict[str, dict]) -> str:
    """Kernel times of stock forwards, as Markdown."""
    rows = [["stock", "clip (tokens)", "the forward", "matrix products", "attention", "all the rest", "launches"]]
    for section in (section for document in found.values() for section in document["sections"]):
        stock = section["arms"]["eager"] if section["section"] == "forward" else {}
        if "split_ms" in stock:
            times = [stock["gpu_ms"], *stock["split_ms"].values()]
            launches = f"{sum(stock['launches'].values()):,}"
            rows.append([_what(section), _model_and_clip(section)[1], *(f"{ms:.0f}" for ms in times), launches])
    return markdown(rows, left=2)


def page(found: dict[str, dict]) -> str:
    """The generated part of docs/results.md."""
    return f"{summary(found)}\n\n{SPENT}\n\n{where_stock_spends(found)}"


def picture(found: dict[str, dict]) -> str:
    """Stock, compiled, ours and floor as an SVG: a forward and guided steps of one clip, the first with all of these arms."""
    wanted = [
        (machine, section)
        for machine, sections in _by_machine(found).items()
        for section in sections
        if section["section"] in ("forward", "step") and section["equal"] and DRAWN.keys() <= section["arms"].keys()
    ]
    head = next(((machine, section["version"], section["clip"]) for machine, section in wanted), None)
    groups = [section for machine, section in wanted if (machine, section["version"], section["clip"]) == head]
    lines, y = [], 8
    for section in groups:
        given = ", latents given" if section.get("given_latents") else ""
        y += 20
        lines.append(f'<text class="title" x="8" y="{y}">{_what(section)}{given}</text>')
        for name, label in DRAWN.items():
            arm, y = section["arms"][name], y + 20
            width = 340 / arm["speed_up"]
            lines.append(f'<text x="112" y="{y}" text-anchor="end">{label}</text>')
            lines.append(f'<rect class="{name.split()[0]}" x="120" y="{y - 12}" width="{width:.1f}" height="15" rx="2"/>')
            lines.append(f'<text x="{126 + width:.1f}" y="{y}">{_time(name, arm)}</text>')
        y += 10
    if groups:
        machine, first = head[0].split(",")[0].strip("*"), groups[0]
        captions = [f"LTX-{first['version']}, {first['clip']} ({first['video_tokens']:,} video tokens), {machine}.", *CAPTIONS]
    else:
        captions = [NONE]
    for caption in captions:
        y += 17
        lines.append(f'<text class="note" x="8" y="{y}">{caption}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{y + 10}" viewBox="0 0 600 {y + 10}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>\n"])


def _time(name: str, arm: dict | None) -> str:
    if arm is None:
        return ""
    if "speed_up" not in arm:
        return "not timed" if name == "eager" else "other bits"
    time = f"{arm['seconds']:.1f} s" if "seconds" in arm else f"{arm['gpu_ms']:.1f} ms"
    return time if arm["speed_up"] == 1 else f"{time}, {arm['speed_up']:.2f}×"


def _machine(at: dict) -> str:
    power = f", {at['gpu_power_limit_w']:.0f} W" if at.get("gpu_power_limit_w") else ""
    versions = [f"{tool} {at[tool]}" for tool in ("torch", "triton", "diffusers", "cuda.core") if at.get(tool)]
    return f"**{at['gpu']}**{power}, {', '.join(versions)}"


def tables(found: dict[str, dict]) -> str:
    """All that the runs say, as Markdown for the folder that they lie in."""
    if not found:
        return NONE
    return "\n\n".join(_run(name, document) for name, document in found.items())


def _run(name: str, document: dict) -> str:
    at = document["environment"]
    place = f"{_machine(at)}, {document['date'][:10]}, commit {at.get('commit') or 'unknown'}"
    parts = [f"## [{name}]({name})", f"{place}: `{_command(document)}`"]
    forwards = [section for section in document["sections"] if section["section"] not in ("kernels", "pipeline")]
    parts += [_forwards(forwards)] if forwards else []
    pipelines = [section for section in document["sections"] if section["section"] == "pipeline"]
    parts += [_pipelines(pipelines)] if pipelines else []
    parts += [_kernels(section) for section in document["sections"] if section["section"] == "kernels"]
    return "\n\n".join(parts)


def _command(document: dict) -> str:
    """The command line that makes such a run, without options that have their defaults."""
    words = ["python -m ltx2_fastpath.bench", document["command"]]
    for option, value in document["options"].items():
        flag = "--" + option.replace("_", "-")
        if value in (None, False, DEFAULTS.get(option)):
            continue
        if value is True:
            words.append(flag)
        elif option == "arms":
            words.append(f"{flag} {','.join(value)}")
        else:
            words += [f"{flag} {each}" for each in (value if isinstance(value, list) else [value])]
    return " ".join(words)


def markdown(rows: list[list[str]], left: int = 1) -> str:
    """A table; the first row is its head, the first `left` columns are flush left, the others flush right."""
    rule = ["---" if column < left else "---:" for column in range(len(rows[0]))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


def _forwards(sections: list[dict]) -> str:
    names = "LTX, clip (tokens), rows, arm, bits, GPU ms, over stock, of floor, host ms, kernels, peak GiB, first s"
    high = any("high" in section["arms"] for section in sections)
    rows = [names.split(", ") + ["over fast path"] * high]
    for section in sections:
        passes = " + ".join(f"{count} {guidance}" for guidance, count in section["passes"].items())
        first = [*_model_and_clip(section), passes]
        for name, arm in section["arms"].items():
            over_fast = [f"{arm['over_fast']:.2f}×" if "over_fast" in arm else ""] * high
            rows.append([*first, ARMS.get(name, name), _bits(name, arm), *_forward(arm), *over_fast])
            first = ["", "", ""]
    return markdown(rows, left=5)


def _pipelines(sections: list[dict]) -> str:
    rows = [["LTX", "clip (tokens)", "steps", "arm", "bits", "seconds", "over stock", "STG prefixes reused", "peak GiB"]]
    for section in sections:
        first = [*_model_and_clip(section), str(section["steps"])]
        for name, arm in section["arms"].items():
            rows.append([*first, ARMS.get(name, name), _bits(name, arm), *_pipeline(arm, section["steps"])])
            first = ["", "", ""]
    head = "Whole pipeline calls, to the latents: the default guidance, three forwards a step. One call of each arm, in turn:"
    return f"{head}\n\n{markdown(rows, left=5)}"


def _model_and_clip(section: dict) -> list[str]:
    kind = ", image to video" if section["image_to_video"] else ""
    kind += ", latents given" if section.get("given_latents") else ""
    layers = "" if section["layers"] == 48 else f", {section['layers']} layers"
    return [f"{section['version']}{layers}", f"{section['clip']}{kind} ({section['video_tokens']:,})"]


def _bits(name: str, arm: dict) -> str:
    if name == "eager":
        return "reference"
    if "equal" not in arm:
        return "-"
    if all(arm["equal"].values()):
        return "equal"
    psnr = arm.get("psnr_db", {}).items()
    decibels = ", ".join(f"{modality} {'equal' if value is None else f'{value:.1f} dB'}" for modality, value in psnr)
    return f"differ: PSNR {decibels}" if decibels else "differ"


def _pipeline(arm: dict, steps: int) -> list[str]:
    if "seconds" not in arm:
        return ["not timed", *[""] * 3]
    return [
        f"{arm['seconds']:.1f}",
        f"{arm['speed_up']:.2f}×",
        f"{arm['prefixes_reused']} of {steps}" if "prefixes_reused" in arm else "-",
        f"{arm['peak_bytes'] / 2**30:.1f}",
    ]


def _forward(arm: dict) -> list[str]:
    if "gpu_ms" not in arm:
        return ["not timed", *[""] * 6]
    return [
        f"{arm['gpu_ms']:.1f}",
        f"{arm['speed_up']:.2f}×",
        f"{arm['times_floor']:.2f}×" if "times_floor" in arm else "-",
        f"{arm['host_ms']:.0f}",
        f"{arm['launches']['kernels']:,}",
        f"{arm['peak_bytes'] / 2**30:.1f}",
        f"{arm['first_call_s']:.1f}",
    ]


def _rows_of(shape: str) -> int:
    """Rows of the larger side of "batch x tokens x width" or "batch x tokens_q/tokens_k x width"."""
    batch, tokens, _ = shape.split(" x ")
    return int(batch) * max(map(int, tokens.split("/")))


def _kernels(section: dict) -> str:
    groups: dict[str, list[dict]] = {}
    for row in (row for row in section["rows"] if row["operation"] not in REMOVED):
        groups.setdefault(row["operation"], []).append(row)
    lines = [["operation", "bits", "shapes", "over its eager chain", "of copy bandwidth"]]
    for operation, rows in groups.items():
        equal = sum(row["equal"] is True for row in rows)
        timed = [row for row in rows if "speed_up" in row]
        large = [row for row in timed if _rows_of(row["shape"]) >= LARGE] or timed
        cells = ["not timed", ""]
        if large:
            speeds, shares = [row["speed_up"] for row in large], [100 * row["copy_share"] for row in large]
            cells = [_range(speeds, "{:.1f}", "×"), _range(shares, "{:.0f}", " %")]
        judged = sum(row["equal"] is not None for row in rows)  # the others are left to torch, and their rows say why
        bits = f"equal at {equal} of {judged}" if judged else "-"
        lines.append([operation, bits, str(len(large)), *cells])
    head = (
        f"Fused operations, {section['dtype']}, L2 cold, at shapes of {LARGE:,} rows and more where there are any;"
        f" a large copy moves {section['copy_gb_s']:,.0f} GB/s:"
    )
    return f"{head}\n\n{markdown(lines, left=2)}"


def _range(values: list[float], form: str, unit: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def insert(text: str, section: str) -> str:
    """`text` with its generated section replaced. Raises ValueError if the markers are missing."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError("the file must have the results' markers once")
    return pattern.sub(lambda _: f"{BEGIN}\n{section}\n{END}", text)


# Which function writes which file: an SVG whole, of the others the generated section.
WRITTEN = {DOCS / "results.md": page, DOCS / "results.svg": picture, RESULTS / "README.md": tables}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    found, stale = documents(), []
    for path, write in WRITTEN.items():
        before = path.read_text() if path.exists() else ""
        after = write(found) if path.suffix == ".svg" else insert(before, write(found))
        if before != after:
            stale.append(path)
            if not options.check:
                path.write_text(after)
    if not options.check:
        return 0
    print("Not what the results say: " + ", ".join(map(str, stale)) if stale else "All is what the results say.")
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
