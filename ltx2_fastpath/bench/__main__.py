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
# Arms of `forward`; the first two always run.
ARMS = ("eager", "fast", "compiled", "fast + compile", "floor")
# Repeats of each section, without and with --quick; and steps of a pipeline call.
REPEATS = {"kernels": (30, 5), "forward": (10, 3), "step": (5, 2), "small": (20, 5), "setups": (3, 2)}
STEPS = (30, 4)
EQUAL, DIFFERENT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
EPILOG = """\
Nothing is timed before its bits equal those of stock diffusers on the same inputs. Compare numbers of one run only: a GPU at
its power limit changes its clock. On an H200 `kernels` takes a minute and `forward` two minutes a shape, one with --quick; a
`pipeline` call takes two seconds a step.

Exit status: 0 everything equal, 1 something differs, 2 wrong arguments or no usable GPU, 130 interrupted (the JSON file keeps
what was finished)."""


def parser() -> argparse.ArgumentParser:
    """The command line. It is there at once: nothing that needs diffusers' pipelines is imported for it."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, after every section")
    common.add_argument("--plot", type=Path, metavar="FILE", help="draw the results, .png or .svg (needs matplotlib)")
    common.add_argument("--version", choices=VERSIONS, default="2.3", help="of LTX-2 (default: %(default)s)")
    common.add_argument("--quick", action="store_true", help="fewer repeats or steps, and nothing compiled: a check")
    repeated = argparse.ArgumentParser(add_help=False)
    repeated.add_argument("--repeats", type=_at_least(1), metavar="N", help="timed calls of each arm")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--layers", type=_at_least(1), metavar="N", help="shorten the stack of 48 (default: all that fit)")
    clips = argparse.ArgumentParser(add_help=False)
    clips.add_argument(
        "--shape",
        action="append",
        metavar="HxWxF",
        help=f"height, width in pixels, and frames; can be given more than once (default: {SHAPE})",
    )
    images = argparse.ArgumentParser(add_help=False)
    images.add_argument("--image-to-video", action="store_true", help="a timestep for every token")
    latents = argparse.ArgumentParser(add_help=False)
    latents.add_argument(
        "--given-latents",
        action="store_true",
        help="as in a call that is given its latents, whose STG pass can start at its first perturbed block",
    )
    modular = argparse.ArgumentParser(add_help=False)
    modular.add_argument(
        "--modular", action="store_true", help="as in modular pipelines: a pass for each prompt, all with one latents tensor"
    )
    tiers = argparse.ArgumentParser(add_help=False)
    tiers.add_argument("--high", action="store_true", help='add the arm of quality="high", whose difference is reported')

    main = argparse.ArgumentParser(
        prog="python -m ltx2_fastpath.bench",
        description=__doc__ + "\nWithout arguments: forward.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sections = main.add_subparsers(dest="section", metavar="SECTION", required=True)

    def section(name: str, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return sections.add_parser(name, parents=[*parents, common], help=summary, description=summary)

    section("kernels", "each fused operation against its eager chain, at production shapes", repeated)
    forward = section(
        "forward",
        "one forward of the transformer: eager, fast, compiled, fast + compile, and its matrix products and attention alone",
        model,
        clips,
        images,
        tiers,
        repeated,
    )
    forward.add_argument(
        "--arms",
        type=_arms,
        default=ARMS,
        metavar="NAME,...",
        help=f"run only these beside eager and fast (default: {','.join(ARMS)})",
    )
    forward.add_argument("--batch-size", type=_at_least(1), default=1, metavar="N", help="rows (default: 1)")
    forward.add_argument("--guidance", choices=("cfg", "stg", "isolated"), default="cfg", help="default: %(default)s")
    section(
        "step",
        "the three guidance passes of a denoising step: eager, fast, compiled, and the floor",
        model,
        clips,
        images,
        latents,
        modular,
        tiers,
        repeated,
    )
    section("small", "a forward so short that the host is the limit: eager, fast, and both as CUDA graphs", model, repeated)
    setups = section(
        "setups",
        "a guided step and a single row as smaller cards are set up (casting, offloading, quantised weights, LoRAs): eager, fast",
        model,
        clips,
        repeated,
    )
    setups.add_argument(
        "--setup", action="append", metavar="NAME", help="only this one; can be given more than once (default: all of them)"
    )
    setups.add_argument("--memory", type=_at_least(1), metavar="GiB", help="allocate no more than this on the GPU")
    pipeline = section(
        "pipeline", "one whole pipeline call, to the latents, with its guidance: eager, fast", model, clips, latents, tiers
    )
    pipeline.add_argument(
        "--steps",
        type=_at_least(2),  # with a single one the scheduler divides zero by zero
        action="append",
        metavar="N",
        help=f"denoising steps; can be given more than once (default: {STEPS[0]})",
    )
    return main


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    command = parser()
    options = command.parse_args((sys.argv[1:] if argv is None else argv) or ["forward"])
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        command.error("--plot needs matplotlib: pip install matplotlib")
    if not torch.cuda.is_available():
        return _fail("the benchmark needs a CUDA device, and torch sees none")

    from ltx2_fastpath.console import Progress
    from ltx2_fastpath.testing import models

    from . import document, forward, table, timing

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
    from . import forward, kernels

    if options.section == "pipeline":
        yield from _pipelines(options, clips, results, meter, progress)
        return
    default, quick = REPEATS[options.section]
    repeats = options.repeats or (quick if options.quick else default)
    if options.section == "kernels":
        section: dict[str, Any] = {"section": "kernels"}
        results["sections"].append(section)
        kernels.run(section, options.version, meter, repeats=repeats, progress=progress, save=save)
        yield section
        return

    if options.section == "setups":
        yield from _setups(options, clips, results, meter, repeats, progress)
        return
    arms: tuple[str, ...]
    high = getattr(options, "high", False)
    if options.section == "forward":
        arms, passes = options.arms, {options.guidance: options.batch_size}
    elif options.section == "step":
        arms, passes = forward.STEP_ARMS, forward.MODULAR_PASSES if options.modular else forward.STEP_PASSES
    else:
        arms, passes, clips = forward.SMALL_ARMS, {"cfg": 1}, [forward.SMALL_CLIP]
    if options.quick:
        arms = tuple(arm for arm in arms if arm not in forward.COMPILED_ARMS)
    if high:
        arms = *arms[:2], forward.HIGH, *arms[2:]
    transformer, notes = _build(options, clips, max(passes.values()), progress)
    instances = forward.instances_of(transformer, high=high)
    for clip in clips:
        section = {"section": options.section, "version": options.version, "notes": [*notes]}
        forward.measure(
            section, instances, clip, passes, arms, meter,
            image_to_video=getattr(options, "image_to_video", False), given_latents=getattr(options, "given_latents", False),
            repeats=repeats, progress=progress,
        )  # fmt: skip
        results["sections"].append(section)
        yield section


def _pipelines(options, clips, results: dict, meter, progress) -> Iterator[dict]:
    """A section for each size and number of steps."""
    from . import forward, pipeline

    default, quick = STEPS
    transformer, notes = _build(options, clips, max(forward.STEP_PASSES.values()), progress)
    arms = pipeline.arms_of(transformer, high=options.high)
    for clip in clips:
        pipeline.warm_up(arms, clip, options.given_latents, progress)
        for steps in options.steps or [quick if options.quick else default]:
            section = {"section": "pipeline", "version": options.version, "notes": [*notes]}
            pipeline.measure(section, arms, clip, options.given_latents, steps, meter, progress)
            results["sections"].append(section)
            yield section


def _setups(options, clips, results: dict, meter, repeats: int, progress) -> Iterator[dict]:
    """Two sections, of a guided step and of a single row, for each setup and size."""
    from . import forward, setups

    if unknown := [name for name in options.setup or () if name not in setups.SETUPS]:
        raise forward.Unusable(
            f"unknown setup {', '.join(map(repr, unknown))}; choose from {', '.join(map(repr, setups.SETUPS))}"
        )
    for clip in clips:
        for name in options.setup or setups.SETUPS:
            section = {"section": "setups", "version": options.version, "notes": []}
            with setups.limited(options.memory):
                for measured in setups.run(section, name, clip, options.layers, meter, repeats=repeats, progress=progress):
                    results["sections"].append(measured)
                    yield measured


def _build(options, clips, rows: int, progress):
    """The stock transformer, with as many layers as fit, and notes on it."""
    from ltx2_fastpath.testing import models

    from . import forward

    progress("building the transformer")
    free_bytes, _ = torch.cuda.mem_get_info()
    layers, note = forward.choose_layers(options.version, options.layers, clips, rows, free_bytes)
    transformer = models.build_transformer(options.version, num_layers=layers, device="cuda", dtype=torch.bfloat16)
    return transformer, [note] if note else []


def _settings(options: argparse.Namespace) -> dict:
    """What can change a number: no paths."""
    return {name: value for name, value in vars(options).items() if name not in ("section", "json", "plot")}


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return number


def _arms(text: str) -> tuple[str, ...]:
    """The named arms and those that always run, in the order of ARMS."""
    asked = [name.strip() for name in text.split(",")]
    if unknown := [name for name in asked if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(map(repr, unknown))}, choose from {','.join(ARMS)}")
    return tuple(name for name in ARMS if name in asked or name in ARMS[:2])


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return UNUSABLE


if __name__ == "__main__":
    raise SystemExit(main())
