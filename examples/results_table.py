"""Write the README's tables of results from the benchmark's JSON files in examples/results.

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
README = EXAMPLES.parent / "README.md"
BEGIN, END = "<!-- results: written by `make results`, do not edit -->", "<!-- end of results -->"
NONE = "No results are committed yet: run `make bench` on a GPU."
SCHEMA = 1
#: Kernel rows are summed up over the shapes with at least so many rows; the JSON has every shape.
LARGE = 6144
ARMS = {
    "eager": "stock",
    "compiled": "compiled",
    "fast": "fast path",
    "high": "fast path, high",
    "fast + compile": "fast path, compiled",
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


def tables(found: dict[str, dict]) -> str:
    """The README's section for these runs, as Markdown."""
    if not found:
        return NONE
    return "\n\n".join(_run(name, document) for name, document in found.items())


def _run(name: str, document: dict) -> str:
    at = document["environment"]
    power = f", {at['gpu_power_limit_w']:.0f} W" if at.get("gpu_power_limit_w") else ""
    versions = [f"{tool} {at[tool]}" for tool in ("torch", "triton", "diffusers", "cuda.core") if at.get(tool)]
    place = f"**{at['gpu']}**{power}, {', '.join(versions)}, {document['date'][:10]}, commit {at.get('commit') or 'unknown'}"
    parts = [f"{place} ([{name}](examples/results/{name})):"]
    forwards = [section for section in document["sections"] if section["section"] not in ("kernels", "pipeline")]
    parts += [_forwards(forwards)] if forwards else []
    pipelines = [section for section in document["sections"] if section["section"] == "pipeline"]
    parts += [_pipelines(pipelines)] if pipelines else []
    parts += [_kernels(section) for section in document["sections"] if section["section"] == "kernels"]
    return "\n\n".join(parts)


def markdown(rows: list[list[str]], left: int = 1) -> str:
    """A table; the first row is its head, the first `left` columns are flush left, the others flush right."""
    rule = ["---" if column < left else "---:" for column in range(len(rows[0]))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


def _forwards(sections: list[dict]) -> str:
    rows = [
        ["LTX", "clip (tokens)", "rows", "arm", "bits", "GPU ms", "over stock", "of floor", "host ms", "kernels", "peak GiB"]
    ]  # fmt: skip
    high = any("high" in section["arms"] for section in sections)
    rows[0] += ["over fast path"] * high
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
    kind += ", latents given" if section.get("latents") == "given" else ""
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
        return ["not timed", *[""] * 5]
    return [
        f"{arm['gpu_ms']:.1f}",
        f"{arm['speed_up']:.2f}×",
        f"{arm['times_floor']:.2f}×" if "times_floor" in arm else "-",
        f"{arm['host_ms']:.0f}",
        f"{arm['launches']['kernels']:,}",
        f"{arm['peak_bytes'] / 2**30:.1f}",
    ]


def _rows_of(shape: str) -> int:
    """Rows of the larger side of "batch x tokens x width" or "batch x tokens_q/tokens_k x width"."""
    batch, tokens, _ = shape.split(" x ")
    return int(batch) * max(map(int, tokens.split("/")))


def _kernels(section: dict) -> str:
    groups: dict[str, list[dict]] = {}
    for row in section["rows"]:
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


def insert(readme: str, section: str) -> str:
    """The README with its generated section replaced. Raises ValueError if the markers are missing."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError("the README must have the results' markers once")
    return pattern.sub(lambda _: f"{BEGIN}\n{section}\n{END}", readme)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    before = README.read_text()
    after = insert(before, tables(documents()))
    if options.check:
        print("The README's results are " + ("those of the files." if before == after else "not those of the files."))
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
