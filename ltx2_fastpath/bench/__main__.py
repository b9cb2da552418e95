"""Benchmark of the fast path on this machine's GPU: the bits first, then the times, with every opponent in the same run."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

VERSIONS = ("2.0", "2.3", "2.5")
SHAPE = "512x768x121"
# Repeats of each section, without and with --quick.
REPEATS = {"kernels": (30, 5), "forward": (10, 3), "step": (5, 2), "small": (20, 5)}
EQUAL, DIFFERENT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
EPILOG = """\
Nothing is timed before its bits equal those of stock diffusers on the same inputs. Compare numbers of one run only: a GPU at
its power limit changes its clock. On an H200 `kernels` takes a minute and `forward` two minutes a shape, one with --quick.

Exit status: 0 everything equal, 1 something differs, 2 wrong arguments or no usable GPU, 130 interrupted (the JSON file keeps
what was finished)."""


def parser() -> argparse.ArgumentParser:
    """The command line. It is there at once: nothing that needs diffusers' pipelines is imported for it."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, after every section")
    common.add_argument("--plot", type=Path, metavar="FILE", help="draw the results, .png or .svg (needs matplotlib)")
    common.add_argument("--version", choices=VERSIONS, default="2.3", help="of LTX-2 (default: %(default)s)")
    common.add_argument("--repeats", type=_positive, metavar="N", help="timed calls of each arm")
    common.add_argument("--quick", action="store_true", help="fewer repeats, and nothing compiled: a check")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--layers", type=_positive, metavar="N", help="shorten the stack of 48 (default: all that fit)")
    clips = argparse.ArgumentParser(add_help=False)
    clips.add_argument(
        "--shape",
        action="append",
        metavar="HxWxF",
        help=f"height, width in pixels, and frames; can be given more than once (default: {SHAPE})",
    )
    clips.add_argument("--image-to-video", action="store_true", help="a timestep for every token")

    main = argparse.ArgumentParser(
        prog="python -m ltx2_fastpath.bench",
        description=__doc__ + "\nWithout a SECTION: forward.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sections = main.add_subparsers(dest="section", metavar="SECTION", required=True)

    def section(name: str, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return sections.add_parser(name, parents=[*parents, common], help=summary, description=summary)

    section("kernels", "each fused operation against its eager chain, at production shapes")
    forward = section(
        "forward",
        "one forward of the transformer: eager, fast, compiled, fast + compile, and its matrix products and attention alone",
        model,
        clips,
    )
    forward.add_argument("--batch-size", type=_positive, default=1, metavar="N", help="rows (default: 1)")
    forward.add_argument("--guidance", choices=("cfg", "stg", "isolated"), default="cfg", help="default: %(default)s")
    section("step", "the three guidance passes of a denoising step: eager, fast, compiled", model, clips)
    section("small", "a forward so short that the host is the limit: eager, fast, and both as CUDA graphs", model)
    return main


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    command = parser()
    options = command.parse_args((sys.argv[1:] if argv is None else argv) or ["forward"])
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        command.error("--plot needs matplotlib: pip install matplotlib")
    if not torch.cuda.is_available():
        return _fail("the benchmark needs a CUDA device, and torch sees none")

    from . import document, forward, models, table, timing
    from .progress import Progress

    try:
        clips = [models.Clip.parse(shape) for shape in getattr(options, "shape", None) or [SHAPE]]
    except ValueError as error:
        command.error(f"argument --shape: {error}")
    results = document.new(options.section, _settings(options))
    progress = Progress()

    def save():
        if options.json:
            document.save(results, options.json)

    try:
        save()  # a path that cannot be written fails now, not after the measurements
        for section in _sections(options, clips, results, timing.CudaMeter(), progress, save):
            progress.clear()
            print(table.section_text(section), flush=True)
            save()
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (forward.Unusable, torch.OutOfMemoryError, OSError) as error:
        progress.clear()
        return _fail(str(error))
    results["complete"] = True
    save()
    if options.plot:
        from . import plot

        try:
            plot.save(results, options.plot)
        except ValueError as error:
            print(f"no plot: {error}", file=sys.stderr)
    return EQUAL if all(section["equal"] for section in results["sections"]) else DIFFERENT


def _sections(options, clips, results: dict, meter, progress, save: Callable[[], None]) -> Iterator[dict]:
    """Measure what `options` ask for; every section is yielded when it is finished and in `results`."""
    from . import forward, kernels, models

    default, quick = REPEATS[options.section]
    repeats = options.repeats or (quick if options.quick else default)
    if options.section == "kernels":
        section: dict[str, Any] = {"section": "kernels"}
        results["sections"].append(section)
        kernels.run(section, options.version, meter, repeats=repeats, progress=progress, save=save)
        yield section
        return

    arms: tuple[str, ...]
    if options.section == "forward":
        arms, passes = forward.FORWARD_ARMS, {options.guidance: options.batch_size}
    elif options.section == "step":
        arms, passes = forward.STEP_ARMS, forward.STEP_PASSES
    else:
        arms, passes, clips = forward.SMALL_ARMS, {"cfg": 1}, [forward.SMALL_CLIP]
    if options.quick:
        arms = tuple(arm for arm in arms if arm not in forward.COMPILED_ARMS)

    progress("building the transformer")
    free_bytes, _ = torch.cuda.mem_get_info()
    layers, note = forward.choose_layers(options.version, options.layers, clips, max(passes.values()), free_bytes)
    transformer = models.build_transformer(options.version, num_layers=layers, device="cuda", dtype=torch.bfloat16)
    instances = forward.instances_of(transformer)
    for clip in clips:
        section = {"section": options.section, "version": options.version, "notes": [note] if note else []}
        forward.measure(
            section, instances, clip, passes, arms, meter,
            image_to_video=getattr(options, "image_to_video", False), repeats=repeats, progress=progress,
        )  # fmt: skip
        results["sections"].append(section)
        yield section


def _settings(options: argparse.Namespace) -> dict:
    """What can change a number: no paths."""
    return {name: value for name, value in vars(options).items() if name not in ("section", "json", "plot")}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return UNUSABLE


if __name__ == "__main__":
    raise SystemExit(main())
