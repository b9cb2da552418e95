"""The README, the docs, the changelog and the examples say what is so: generated tables, figures, targets, links, code."""

import ast
import doctest
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

import ltx2_fastpath
from ltx2_fastpath.testing import models

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


results_table = load(ROOT / "examples" / "results_table.py")


def arm(gpu_ms: float, **more) -> dict:
    record = {
        "gpu_ms": gpu_ms,
        "host_ms": gpu_ms / 2,
        "speed_up": 100.0 / gpu_ms,
        "times_floor": gpu_ms / 50.0,
        "launches": {"kernels": int(100 * gpu_ms), "memsets": 0, "copies": 0},
        "split_ms": {"matrix products": 0.5 * gpu_ms, "attention": 0.2 * gpu_ms, "rest": 0.3 * gpu_ms},
        "peak_bytes": 40 * 2**30,
        "first_call_s": 1.0,
    }
    return record | more


# What the sections of forwards and of pipeline calls have in common.
OF_A_MODEL = {
    "version": "2.3",
    "clip": "512x768x121",
    "video_tokens": 6144,
    "audio_tokens": 126,
    "image_to_video": False,
    "layers": 48,
    "dtype": "bfloat16",
    "notes": [],
    "equal": True,
}


def forward_section(**more) -> dict:
    equal, differ = {"cfg video": True, "cfg audio": True}, {"cfg video": False, "cfg audio": True}
    section = {
        "section": "forward",
        **OF_A_MODEL,
        "passes": {"cfg": 1},
        "arms": {
            "eager": arm(100.0),
            "fast": arm(62.5, equal=equal),
            "compiled": arm(80.0, equal=differ),
            "floor": arm(50.0),
        },
    }
    return section | more


def pipeline_section(**more) -> dict:
    section = {
        "section": "pipeline",
        **OF_A_MODEL,
        "text_tokens": 1024,
        "steps": 30,
        "passes": {"cfg": 2, "stg": 1, "isolated": 1},
        "arms": {
            "eager": {"peak_bytes": 41 * 2**30, "seconds": 60.0, "speed_up": 1.0},
            "fast": {
                "peak_bytes": 40 * 2**30,
                "seconds": 33.0,
                "speed_up": 60 / 33,
                "prefixes_reused": 30,
                "equal": {"video": True, "audio": True},
            },
            "high": {
                "peak_bytes": 40 * 2**30,
                "seconds": 30.0,
                "speed_up": 2.0,
                "prefixes_reused": 29,
                "equal": {"video": False, "audio": True},
                "psnr_db": {"video": 61.23, "audio": None},
            },
        },
    }
    return section | more


def cells(table: str) -> list[list[str]]:
    """The rows of the tables in Markdown."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]


def kernel_row(operation: str, shape: str, speed_up: float = 5.0, copy_share: float = 0.9) -> dict:
    return {"operation": operation, "shape": shape, "equal": True, "speed_up": speed_up, "copy_share": copy_share}


def kernels_section() -> dict:
    rows = [
        kernel_row("QK-norm + RoPE", "1 x 6144/6144 x 4096", 4.5, 0.91),
        kernel_row("QK-norm + RoPE", "2 x 14080/14080 x 4096", 6.25, 0.875),
        kernel_row("QK-norm + RoPE", "1 x 126/126 x 2048", 20.0, 0.1),
        {"operation": "prompt modulation", "shape": "1 x 1024 x 4096", "equal": None, "note": "cuda.core is not installed"},
        kernel_row("GELU", "1 x 6144 x 16384"),  # which the product does not have any more
        {"operation": "head gate", "shape": "1 x 6144 x 4096", "equal": False, "note": "other bits"},
    ]
    return {"section": "kernels", "version": "2.3", "dtype": "bfloat16", "copy_gb_s": 4270.0, "equal": False, "rows": rows}


def document(*sections, **more) -> dict:
    """A finished run of the benchmark, with invented numbers, on a GPU that does not exist."""
    at = {
        "gpu": "Example GPU",
        "gpu_power_limit_w": 700.0,
        "torch": "2.99.0",
        "triton": "3.99.0",
        "diffusers": "0.42.1",
        "cuda.core": None,
        "ltx2_fastpath": "0.1.0",
        "commit": "0123456789ab",
    }
    run = {"schema": 1, "command": "", "options": {}, "date": "2030-01-02T03:04:05Z", "environment": at, "complete": True}
    return run | {"sections": list(sections)} | more


# The generated tables


def test_files_have_what_the_committed_results_say():
    assert results_table.main(["--check"]) == 0, "run `make results`"


def test_forward_table():
    table = results_table.tables({"h.json": document(forward_section())})
    assert "**Example GPU**, 700 W, torch 2.99.0, triton 3.99.0, diffusers 0.42.1, 2030-01-02, commit 0123456789ab: `" in table
    assert "[h.json](h.json)" in table
    rows = cells(table)
    assert rows[2] == [
        "2.3", "512x768x121 (6,144)", "1 cfg", "stock", "reference", "100.0", "1.00×", "2.00×", "50", "10,000", "40.0", "1.0"
    ]  # fmt: skip
    assert rows[3] == ["", "", "", "fast path", "equal", "62.5", "1.60×", "1.25×", "31", "6,250", "40.0", "1.0"]
    assert rows[4][3:6] == ["compiled", "differ", "80.0"]
    assert rows[5][3:5] == ["floor", "-"]
    assert len({len(row) for row in rows}) == 1


def test_summary_has_a_table_for_each_kind_of_section_and_a_column_for_each_arm():
    timed = {"eager": arm(100.0), "fast": arm(50.0), "eager as a graph": arm(40.0), "fast + graphs": arm(20.0)}
    small = forward_section(section="small", arms=timed)
    step = forward_section(section="step", passes={"cfg": 2, "stg": 1}, given_latents=True, image_to_video=True)
    untimed = {"eager": {"peak_bytes": 1}, "fast": {"equal": {"cfg video": False}}}
    unequal = forward_section(version="2.0", equal=False, arms=untimed)
    runs = {
        "a.json": document(small, pipeline_section()),
        "b.json": document(step, kernels_section(), unequal),
        "c.json": document(forward_section(passes={"cfg": 2})),
        "d.json": document(kernels_section(), environment={"gpu": "Another GPU"}),
    }
    summary = results_table.summary(runs)
    assert summary.startswith("**Example GPU**, 700 W, torch 2.99.0, triton 3.99.0, diffusers 0.42.1:\n\n")
    assert "Another GPU" not in summary  # which has run no whole forward
    clip = "512x768x121 (6,144)"
    tables = [cells(table) for table in summary.split("\n\n")[1:]]
    head = ["LTX", "what", "clip (tokens)"]
    timed = ["100.0 ms", "80.0 ms, 1.25×", "62.5 ms, 1.60×", "50.0 ms, 2.00×"]
    assert [[row for row in table if "---" not in row] for table in tables] == [
        [
            [*head, "stock", "compiled", "fast path", "floor"],
            ["2.0", "forward", clip, "not timed", "", "other bits", ""],
            ["2.3", "forward, 2 rows", clip, *timed],
        ],
        [
            [*head, "stock", "compiled", "fast path", "floor"],
            ["2.3", "guided step", "512x768x121, image to video, latents given (6,144)", *timed],
        ],
        [
            [*head, "stock", "fast path", "high"],
            ["2.3", "30-step call, to the latents", clip, "60.0 s", "33.0 s, 1.82×", "30.0 s, 2.00×"],
        ],
        [
            [*head, "stock", "stock as one CUDA graph", "fast path", "fast path, cuda_graphs=True"],
            ["2.3", "forward", clip, "100.0 ms", "40.0 ms, 2.50×", "50.0 ms, 2.00×", "20.0 ms, 5.00×"],
        ],
    ]
    assert tables[0][1] == [*3 * ["---"], *4 * ["---:"]]
    assert results_table.summary({"b.json": document(kernels_section())}) == results_table.NONE


def test_where_stock_spends_its_time():
    untimed = forward_section(equal=False, arms={"eager": {"peak_bytes": 1}})
    runs = {"a.json": document(kernels_section(), forward_section(), untimed, forward_section(section="step"))}
    assert cells(results_table.where_stock_spends(runs))[2:] == [
        ["forward", "512x768x121 (6,144)", "100", "50", "20", "30", "10,000"]
    ]
    page = results_table.page(runs)
    assert page.startswith("**Example GPU**") and "launches are kernels" in page and page.endswith("10,000 |")


def test_picture_has_the_bars_of_one_clip():
    step = forward_section(section="step", passes={"cfg": 2, "stg": 1})
    elsewhere = forward_section(clip="704x1280x121")
    without_floor = forward_section(arms={"eager": arm(100.0), "fast": arm(62.5), "compiled": arm(80.0)})
    unequal = forward_section(equal=False)
    runs = {
        "a.json": document(without_floor, unequal, forward_section(), elsewhere, step | {"given_latents": True}),
        "b.json": document(forward_section(), environment={"gpu": "Another GPU"}),
    }
    drawn = results_table.picture(runs)
    root = xml.etree.ElementTree.fromstring(drawn)
    texts = [element.text for element in root.findall("{*}text")]
    bars = [(bar.get("class"), float(bar.get("width"))) for bar in root.findall("{*}rect")]
    assert bars == 2 * [("eager", 340.0), ("compiled", 272.0), ("fast", 212.5), ("floor", 170.0)]
    group = ["stock", "100.0 ms", "compiled", "80.0 ms, 1.25×", "ltx2_fastpath", "62.5 ms, 1.60×", "floor", "50.0 ms, 2.00×"]
    assert texts[:9] == ["forward", *group] and texts[9:18] == ["guided step, latents given", *group]
    assert texts[18] == "LTX-2.3, 512x768x121 (6,144 video tokens), Example GPU."
    # Nothing leaves the picture: characters are about 6 px wide.
    for element in root.findall("{*}text"):
        assert float(element.get("y")) < float(root.get("height"))
        assert element.get("text-anchor") or float(element.get("x")) + 6.5 * len(element.text) < 600
    assert "prefers-color-scheme: dark" in drawn and root.get("width") == "600"
    nothing = xml.etree.ElementTree.fromstring(results_table.picture({}))
    assert [element.text for element in nothing.findall("{*}text")] == [results_table.NONE]


def test_forward_table_says_what_is_special_and_shows_no_time_without_equal_bits():
    unequal = forward_section(
        image_to_video=True, layers=12, equal=False, passes={"cfg": 2, "stg": 1},
        arms={"eager": {"peak_bytes": 1}, "fast": {"equal": {"cfg video": False}, "peak_bytes": 1}},
    )  # fmt: skip
    table = results_table.tables({"h.json": document(unequal)})
    assert "2.3, 12 layers | 512x768x121, image to video (6,144) | 2 cfg + 1 stg | stock | reference | not timed" in table
    assert "| fast path | differ | not timed |" in table


def test_forward_table_shows_high_over_the_lossless_fast_path():
    section = forward_section()
    section["arms"]["high"] = arm(50.0, equal={"cfg video": False}, over_fast=1.25)
    rows = cells(results_table.tables({"h.json": document(section, forward_section())}))
    assert rows[0][-1] == "over fast path" and len({len(row) for row in rows}) == 1
    (high,) = (row for row in rows if row[3] == "high")
    assert high[4:7] == ["differ", "50.0", "2.00×"] and high[-1] == "1.25×"
    assert all(row[-1] == "" for row in rows[2:] if row is not high)


def test_pipeline_table():
    unequal = pipeline_section(
        steps=8, layers=12, equal=False,
        arms={"eager": {"peak_bytes": 1}, "fast": {"peak_bytes": 1, "equal": {"video": False}, "prefixes_reused": 7}},
    )  # fmt: skip
    table = results_table.tables({"p.json": document(pipeline_section(), unequal)})
    assert "Whole pipeline calls" in table and "Fused operations" not in table
    head, _, *rows = cells(table)
    assert head == ["LTX", "clip (tokens)", "steps", "arm", "bits", "seconds", "over stock", "STG prefixes reused", "peak GiB"]
    assert rows == [
        ["2.3", "512x768x121 (6,144)", "30", "stock", "reference", "60.0", "1.00×", "-", "41.0"],
        ["", "", "", "fast path", "equal", "33.0", "1.82×", "30 of 30", "40.0"],
        ["", "", "", "high", "differ: PSNR video 61.2 dB, audio equal", "30.0", "2.00×", "29 of 30", "40.0"],
        ["2.3, 12 layers", "512x768x121 (6,144)", "8", "stock", "reference", "not timed", "", "", ""],
        ["", "", "", "fast path", "differ", "not timed", "", "", ""],
    ]


def test_kernel_table_sums_up_the_large_shapes():
    table = results_table.tables({"k.json": document(kernels_section())})
    assert "a large copy moves 4,270 GB/s" in table
    assert "| QK-norm + RoPE | equal at 3 of 3 | 2 | 4.5 to 6.2× | 88 to 91 % |" in table
    assert "| prompt modulation | - | 0 | not timed |  |" in table and "GELU" not in table
    assert "| head gate | equal at 0 of 1 | 0 | not timed |  |" in table


def test_runs_that_did_not_finish_and_other_files_are_left_out(tmp_path):
    files = {
        "a.json": document(forward_section()),
        "b.json": document(forward_section(), complete=False),
        "c.json": {"something": "else"},
        "d.json": [1, 2],
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert list(results_table.documents(tmp_path)) == ["a.json"]
    assert results_table.documents(tmp_path / "missing") == {}
    assert results_table.tables({}) == "No results are committed yet: run `make bench` on a GPU."
    (tmp_path / "e.json").write_text(json.dumps(document(schema=2)))
    with pytest.raises(ValueError, match="e.json has schema 2"):
        results_table.documents(tmp_path)


def test_schema_arms_and_defaults_are_the_benchmarks():
    from ltx2_fastpath.bench import __main__ as cli
    from ltx2_fastpath.bench import document as bench_document

    assert results_table.SCHEMA == bench_document.SCHEMA
    options = vars(cli.parser().parse_args(["forward"]))
    assert results_table.DEFAULTS.keys() <= options.keys() and options["arms"] == cli.ARMS
    assert json.loads(json.dumps({name: options[name] for name in results_table.DEFAULTS})) == results_table.DEFAULTS


@pytest.mark.parametrize(
    "line",
    [
        "forward --shape 512x768x121 --shape 704x1280x121 --high --repeats 5",
        "forward --image-to-video --arms eager,fast --batch-size 2",
        "pipeline --given-latents --steps 8 --steps 30",
        "kernels --repeats 10 --version 2.5 --quick",
        "small",
    ],
)
def test_a_table_tells_the_command_that_makes_its_run(line):
    from ltx2_fastpath.bench import __main__ as cli

    options = cli.parser().parse_args(line.split())
    run = json.loads(json.dumps({"command": options.section, "options": cli._settings(options)}))
    command = results_table._command(run)
    assert command.startswith("python -m ltx2_fastpath.bench ") and sorted(command.split()[3:]) == sorted(line.split())


def test_writing_and_checking(tmp_path, monkeypatch, capsys):
    page, details, picture = tmp_path / "results.md", tmp_path / "details.md", tmp_path / "results.svg"
    for path in (page, details):
        path.write_text(f"before\n{results_table.BEGIN}\nold\n{results_table.END}\nafter\n")
    written = {page: results_table.page, details: results_table.tables, picture: results_table.picture}
    monkeypatch.setattr(results_table, "WRITTEN", written)
    monkeypatch.setattr(results_table, "documents", lambda: {"h.json": document(forward_section())})
    assert results_table.main(["--check"]) == 1
    told = capsys.readouterr().out
    assert all(str(path) in told for path in written)
    assert all("old" in path.read_text() for path in (page, details)) and not picture.exists()
    assert results_table.main([]) == 0
    assert picture.read_text().startswith("<svg") and "Example GPU" in picture.read_text()
    for path in (page, details):
        text = path.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "Example GPU" in text and "old" not in text
    assert "h.json" in details.read_text() and "h.json" not in page.read_text()
    assert results_table.main(["--check"]) == 0
    with pytest.raises(ValueError, match="markers"):
        results_table.insert("no markers", "")


# Figures in prose

SMALL, LARGE = "512x768x121", "704x1280x121"


def measured(run: str, arm: str, clip: str = SMALL, steps: int | None = None) -> dict:
    """What a committed run has of an arm."""
    sections = results_table.documents()[f"{run}.json"]["sections"]
    (arms,) = (section["arms"] for section in sections if section["clip"] == clip and section.get("steps") == steps)
    return arms[arm]


def of_both(run: str, arm: str, key: str) -> list[float]:
    """A figure of an arm at both sizes."""
    return [measured(run, arm, clip)[key] for clip in (SMALL, LARGE)]


def matrix_products(arm: str) -> list[float]:
    return [parts["matrix products"] for parts in of_both("forward", arm, "split_ms")]


def gains(run: str) -> list[float]:
    """How much faster the fast path is than compiled blocks, in percent, at both sizes."""
    compiled, fast = (of_both(run, arm, "gpu_ms") for arm in ("compiled", "fast"))
    return [100 * (theirs / ours - 1) for theirs, ours in zip(compiled, fast)]


def gib(run: str, arm: str, clip: str) -> float:
    return measured(run, arm, clip)["peak_bytes"] / 2**30


def first_calls(run: str, clip: str) -> list[float]:
    return [measured(run, arm, clip)["first_call_s"] for arm in ("eager", "compiled", "fast")]


def figures() -> list[tuple]:
    """(document, what it says, the figures that the committed results have for that)"""
    psnr = [
        measured("pipeline", "high", steps=steps)["psnr_db"][modality] for steps in (8, 30) for modality in ("video", "audio")
    ]
    results, high = "docs/results.md", "docs/quality_high.md"
    return [
        (
            "README.md",
            "a forward {:.2f} to {:.2f} times as fast, all denoising of a call {:.2f} times, or {:.2f} times where latents are",
            *reversed(of_both("forward", "fast", "speed_up")),
            *(measured(run, "fast", steps=30)["speed_up"] for run in ("pipeline", "pipeline_given_latents")),
        ),
        ("README.md", f"a forward is {{:.1f}} and {{:.1f}} % faster ({SMALL} and {LARGE})", *gains("forward")),
        ("README.md", "a guided step {:.1f} and {:.1f} %, and a guided step with latents given", *gains("step")),
        ("README.md", "a guided step with latents given {:.0f} %.", gains("step_given_latents")[0]),
        ("README.md", "a guided step with latents given {:.0f} %.", gains("step_given_latents")[1]),
        ("README.md", "the first guided step took {:.1f} and {:.1f} s", *of_both("step_given_latents", "fast", "first_call_s")),
        ("README.md", "compiled {:.1f} and {:.1f} s.", *of_both("step_given_latents", "compiled", "first_call_s")),
        (results, "The matrix products, {:.0f} and {:.0f} ms in the stock forwards", *matrix_products("eager")),
        (results, "take {:.0f} and {:.0f} ms beside the fast path", *matrix_products("fast")),
        (
            results,
            "the floor is measured, {:.1f} of {:.1f} ms and {:.1f} of {:.1f} ms",
            *(measured("forward", arm, clip)["gpu_ms"] for clip in (SMALL, LARGE) for arm in ("floor", "eager")),
        ),
        (results, "more than {:.2f} and {:.2f} times as fast as stock", *of_both("forward", "floor", "speed_up")),
        (
            results,
            f"| forward {SMALL}, the first of its process | {{:.1f}} | {{:.1f}} | {{:.1f}} |",
            *first_calls("forward", SMALL),
        ),
        (results, f"| forward {LARGE}, after it | {{:.1f}} | {{:.1f}} | {{:.1f}} |", *first_calls("forward", LARGE)),
        (
            results,
            f"| guided step {SMALL}, latents given, the first of its process | {{:.1f}} | {{:.1f}} | {{:.1f}} |",
            *first_calls("step_given_latents", SMALL),
        ),
        (
            results,
            f"| guided step {LARGE}, latents given, after it | {{:.1f}} | {{:.1f}} | {{:.1f}} |",
            *first_calls("step_given_latents", LARGE),
        ),
        *(
            (high, "Forwards gain {:.1f} % from the masks", 100 * (over_fast - 1))
            for run in ("forward", "forward_batch2")
            for over_fast in of_both(run, "high", "over_fast")
        ),
        (high, "Guided steps with drawn latents gain {:.2f} and {:.2f} times from both", *of_both("step", "high", "over_fast")),
        *(
            (
                high,
                f"{{:.1f}} ms instead of {{:.1f}} ms at {clip}",
                *(measured("step", arm, clip)["gpu_ms"] for arm in ("high", "fast")),
            )
            for clip in (SMALL, LARGE)
        ),
        (high, "{:.1f} dB (video) and {:.1f} dB (audio) against stock after 8 steps, {:.1f} dB and {:.1f} dB after 30", *psnr),
        *(
            (
                "docs/how_it_relates.md",
                f"{{:.1f}} ms instead of {{:.1f}} ms at {clip}",
                *(measured("forward", arm, clip)["gpu_ms"] for arm in ("fast + compile", "compiled")),
            )
            for clip in (SMALL, LARGE)
        ),
        *(
            (
                "docs/memory_and_offload.md",
                f"{{:.1f}} GiB for a {what} at {clip} where stock has {{:.1f}} GiB",
                *(gib(run, arm, clip) for arm in ("fast", "eager")),
            )
            for what, run, clip in (("forward", "forward", SMALL), ("guided step", "step", LARGE))
        ),
    ]


@pytest.mark.parametrize("name, text, values", [(name, text, values) for name, text, *values in figures()])
def test_figures_in_prose_are_those_of_the_committed_results(name, text, values):
    assert text.format(*values) in " ".join((ROOT / name).read_text().split()), "the results say otherwise"


def test_every_time_in_prose_was_measured():
    known = set()
    for run in results_table.documents().values():
        for section in run["sections"]:
            for record in section.get("arms", {}).values():
                times = [record.get("gpu_ms", 0.0), record.get("host_ms", 0.0), *record.get("split_ms", {}).values()]
                known |= {f"{time:.1f}" for time in times}
    for name in ("README.md", *PAGES):
        told = re.findall(r"(\d+\.\d+) ms", (ROOT / name).read_text())
        assert set(told) <= known, name


# What the documents name


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in DOCUMENTS:
        named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE))
        assert {a or b for a, b in named} <= targets, name
    # ... and the Makefile's head lists every target that a person would call.
    head = (ROOT / "Makefile").read_text().split("\n\n")[0]
    assert targets == set(re.findall(r"^# make ([a-z-]+)", head, re.MULTILINE))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_uses_an_environment_that_is_there_as_it_is():
    """Whatever a variable of the shell that has the same name may be for."""

    def plan(*arguments) -> str:
        command = ["make", "--dry-run", "--always-make", "test", *arguments]
        ours = ("PYTHON", "ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # of the make that may run this test
        environment = {name: value for name, value in os.environ.items() if name not in ours} | {"ENVIRONMENT": "production"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "make test ENVIRONMENT=/path/to/environment" in README
    named = plan("ENVIRONMENT=/path/to/environment")
    assert named.startswith("/path/to/environment/bin/python -m pytest ") and "pip" not in named and ".venv" not in named
    assert "python3 -m venv .venv" in plan() and "production" not in plan()


def anchors(path: Path) -> set[str]:
    """What links to the headings of a file say after the number sign."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name):
    path = ROOT / name
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    local = [link.partition("#") for link in links if not link.startswith("http")]
    for file, _, anchor in local:
        target = path.parent / file if file else path
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"
    assert local or name == "CHANGELOG.md"


def test_readme_links_every_page_from_one_list_and_is_short():
    listed = README.split("## More, by question")[1].split("## ")[0]
    assert all(f"]({name})" in listed for name in PAGES)
    assert set(PAGES) == {
        f"docs/{name}.md"
        for name in (
            "results", "exactness", "quality_high", "shared_guidance", "memory_and_offload", "troubleshooting", "how_it_relates",
        )
    }  # fmt: skip
    assert len(README.splitlines()) < 180


def test_every_file_in_the_newcomers_tree_exists():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Where is what")[1].split("```")[1]
    folder = ""
    for line in tree.strip().splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
            assert (ROOT / folder).is_dir(), folder
            continue
        names = re.match(r" +((?:[\w/]+(?:\.py|/) ?)+)", line)[1].split()
        assert names and all((ROOT / folder / name).exists() for name in names), line


def code(names) -> list[str]:
    """The examples in documents."""
    return [block for name in names for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)]


def test_the_documents_code_uses_what_there_is():
    assert "quality" not in "".join(code(["README.md"]))  # lossless, as it says
    tree = ast.parse("\n".join(code(["README.md", *PAGES])))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ltx2_fastpath"
    }
    assert used == {"enable", "disable", "disabled", "quality", "report"} <= set(ltx2_fastpath.__all__)


def test_leaving_a_site_out_as_it_is_written():
    (line,) = (block for block in code(PAGES) if "without" in block)
    assert 'without=("attn1.qk_norm_split_rope",)' in line and 'without=("attn1.qk_norm_split_rope",)' in README
    pipe = models.tiny_transformer("2.3")
    exec(line, {"ltx2_fastpath": ltx2_fastpath, "pipe": pipe})
    with pytest.raises(ValueError, match="attn1.qk_norm_split_rope"):
        ltx2_fastpath.enable(pipe, without=("attn1.qk_norm",))
    assert ltx2_fastpath.enable(pipe).without == ("attn1.qk_norm_split_rope",)
    assert ltx2_fastpath.enable(pipe, without=()).without == ()
    assert ltx2_fastpath.enable(pipe, quality="high").quality == ltx2_fastpath.enable(pipe).quality == "high"
    ltx2_fastpath.disable(pipe)
    assert ltx2_fastpath.enable(pipe).quality == "lossless"


def test_the_line_that_asks_for_unknown_sources_runs(capsys):
    (line,) = re.findall(r'^python -c "(from ltx2_fastpath.patches .*)"$', (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    exec(line, {})
    assert capsys.readouterr().out == "[]\n"


def test_first_paragraph_is_three_lines():
    paragraph = README.split("\n\n")[1]
    assert len(paragraph.splitlines()) == 3 and "without changing an output bit" in paragraph


def test_first_screen_has_the_line_the_commands_and_the_picture():
    screen = README.split("\n## ")[0]
    assert "ltx2_fastpath.enable(pipe)" in screen and "make demo" in screen and "make test" in screen
    assert "](docs/results.svg)" in screen and "compile_repeated_blocks" in screen


def test_troubleshooting_quotes_messages_that_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = "".join(path.read_text() for folder in ("ltx2_fastpath", "patches") for path in (ROOT / folder).rglob("*.py"))
    for message in (
        "no CUDA device is available",
        "this diffusers release is not known (",
        "private names that the fast path needs are not there (",
        "Triton cannot be imported",
        "TRITON_CACHE_DIR",
        "cuda.core is not installed",
        "gradients are enabled",
        "gave other bits than the eager chain",
        " watches a ",
    ):
        assert message in page and message in sources


def test_changelog_knows_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{ltx2_fastpath.__version__}]" in changelog


def test_known_releases_are_the_same_everywhere():
    host = (ROOT / "patches" / "transformer" / "host.py").read_text()
    low, high = re.search(r"diffusers (\d+\.\d+)\.0 to (\d+\.\d+\.\d+)", host).groups()
    bounds = f"'diffusers>={low},<={high}'"
    assert (
        bounds in (ROOT / "docs" / "troubleshooting.md").read_text()
        and bounds in (ROOT / "ltx2_fastpath" / "check.py").read_text()
    )
    assert f"{low}.0 to {high} by their sources" in README
    assert f"diffusers>={low}\n" in (ROOT / "setup.cfg").read_text()


# Code that is documentation


def test_doctests_of_the_public_names():
    results = doctest.testmod(ltx2_fastpath)
    assert results.failed == 0 and results.attempted >= 8


def test_every_public_name_has_a_docstring():
    for name in ltx2_fastpath.__all__:
        if not name.startswith("__"):
            assert getattr(ltx2_fastpath, name).__doc__, name


def test_quickstart_writes_a_clip(tmp_path):
    import av

    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "tiny", "clip.mp4"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ltx2_fastpath: " in done.stdout and "Written: clip.mp4" in done.stdout
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert {stream.type for stream in container.streams} == {"video", "audio"}
        assert sum(1 for _ in container.decode(video=0)) == 9
