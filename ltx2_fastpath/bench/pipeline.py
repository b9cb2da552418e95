"""Whole pipeline calls, from noise to latents: the default guidance, which is three forwards a step, in seconds."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel

from ltx2_fastpath import FastPath
from ltx2_fastpath.testing import models
from ltx2_fastpath.testing.models import Clip

from . import forward
from .forward import EAGER, FAST, HIGH

TEXT_TOKENS = 1024
# The first step shows that there are STG passes, the second verifies their prefix, the third starts from it.
_WARM_UP_STEPS = 3


class Arm(NamedTuple):
    """A pipeline, and the handle of its transformer if that is fast."""

    pipe: LTX2Pipeline
    handle: FastPath | None

    @property
    def reused(self) -> int:
        """How many STG passes have started from the states of the CFG pass before them."""
        return self.handle.sites["guidance.prefix"].fast if self.handle else 0


def arms_of(transformer: LTX2VideoTransformer3DModel, *, high: bool = False) -> dict[str, Arm]:
    """A pipeline for each arm, over one set of weights: `transformer` must be stock and stays so.

    Raises:
        Unusable: the fast path stays off; the message says why.
    """
    qualities = {FAST: "lossless"} | ({HIGH: "high"} if high else {})
    twins = {name: models.twin(transformer) for name in qualities}
    arms = {EAGER: Arm(models.latents_pipeline(transformer), None)}
    for name, twin in twins.items():
        arms[name] = Arm(models.latents_pipeline(twin), forward.make_fast(twin, qualities[name]))
    return arms


def warm_up(arms: dict[str, Arm], clip: Clip, given_latents: bool, progress: Callable[[str], None]) -> None:
    """A short call of every arm: kernels are compiled and verified, libraries initialised, memory is cached."""
    for name, arm in arms.items():
        progress(f"pipeline {clip}: {name}, warm-up of {_WARM_UP_STEPS} steps")
        _call(arm.pipe, clip, given_latents, _WARM_UP_STEPS)()


def measure(
    section: dict, arms: dict[str, Arm], clip: Clip, given_latents: bool, steps: int, meter, progress: Callable[[str], None]
) -> None:
    """Add to `section` (its name, version and notes) one call of every arm, which `warm_up` has seen at this size.

    With `given_latents` the call is given the noise that it would draw.

    The same call gives the latents, the seconds and the memory, for it takes a minute. If the fast arm's latents are not those
    of stock there are no seconds, and what comes after it is not called. The difference of `high` is reported, not judged.
    Memory includes what the other arms keep between their calls.
    """
    transformer = arms[EAGER].pipe.transformer
    frames, height, width, audio_tokens = models.latent_sizes(transformer.config, *clip)
    records: dict[str, dict] = {}
    section |= {
        "clip": str(clip),
        "video_tokens": frames * height * width,
        "audio_tokens": audio_tokens,
        "text_tokens": TEXT_TOKENS,
        "steps": steps,
        "passes": forward.STEP_PASSES,
        "image_to_video": False,
        "given_latents": given_latents,
        "layers": len(transformer.transformer_blocks),
        "dtype": str(transformer.dtype).removeprefix("torch."),
        "equal": True,
        "arms": records,
    }
    expected: dict[str, torch.Tensor] = {}
    seconds = {}
    for name, arm in arms.items():
        progress(f"pipeline {clip}: {name}, {steps} steps")
        before = arm.reused
        outputs, seconds[name], peak_bytes = _timed(_call(arm.pipe, clip, given_latents, steps), meter)
        record = records[name] = {"peak_bytes": peak_bytes}
        if name == EAGER:
            expected = outputs
            continue
        record |= {"prefixes_reused": arm.reused - before} | forward.compare(outputs, expected)
        if name == HIGH:
            record["psnr_db"] = {key: psnr(outputs[key], value) for key, value in expected.items()}
        elif not all(record["equal"].values()):
            section["equal"] = False
            break
    forward.add_report(section, arms[FAST].pipe.transformer)
    if section["equal"]:
        for name, record in records.items():
            record |= {"seconds": seconds[name], "speed_up": seconds[EAGER] / seconds[name]}


def psnr(x: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Peak signal-to-noise ratio in dB, the peak being the range of the reference's values. None if nothing differs."""
    x, reference = x.double(), reference.double()
    if torch.equal(x, reference):
        return None
    peak = reference.max() - reference.min()
    return 10 * torch.log10(peak**2 / (x - reference).square().mean()).item()


def _call(pipe: LTX2Pipeline, clip: Clip, given_latents: bool, steps: int) -> Callable[[], dict[str, torch.Tensor]]:
    """One request, the same for every arm."""
    noise_for = clip if given_latents else None
    request = models.latents_request(pipe.transformer, text_tokens=TEXT_TOKENS, noise_for=noise_for)

    def call():
        output = pipe(**request, **clip._asdict(), num_inference_steps=steps)
        return {"video": output.frames, "audio": output.audio}

    return call


def _timed(call: Callable, meter) -> tuple[dict[str, torch.Tensor], float, int]:
    """What a call returns, its seconds, and the most bytes that were allocated while it ran."""
    results = []
    seconds, peak_bytes = meter.peak(lambda: meter.seconds(lambda: results.append(call())))
    return results[0], seconds, peak_bytes
