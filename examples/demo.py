"""Generate one clip twice, with stock diffusers and with ltx2_fastpath, and compare bits and seconds.

Without arguments this builds a two-layer LTX-2.3 pipeline with random weights, which any machine can run (the picture
is noise). With `--model diffusers/LTX-2.3-Diffusers`, or a folder, it loads real weights; that wants a GPU.
"""

import argparse
import time
from pathlib import Path

import torch
from diffusers import LTX2Pipeline
from diffusers.utils import encode_video
from PIL import Image

import ltx2_fastpath
from ltx2_fastpath.testing import models


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model folder or hub name in diffusers format (default: tiny)")
    parser.add_argument("--offload", action="store_true", help="keep on the GPU only the component that is running")
    parser.add_argument("--prompt", default="A lighthouse in a storm at dusk; waves crash, gulls cry.")
    parser.add_argument("--height", type=int, default=256, help="pixels, a multiple of 32 (default: 256)")
    parser.add_argument("--width", type=int, default=384, help="pixels, a multiple of 32 (default: 384)")
    parser.add_argument("--frames", type=int, default=25, help="8 n + 1, at 24 frames a second (default: 25)")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps, at least 2 (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder (default: demo-output)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the scheduler's last sigma is undefined for one step")
    return arguments


def load_pipeline(arguments: argparse.Namespace, device: str) -> LTX2Pipeline:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if arguments.model == "tiny":
        pipe = models.tiny_pipeline("2.3", dtype=dtype)
    else:
        pipe = LTX2Pipeline.from_pretrained(arguments.model, torch_dtype=dtype)
    if arguments.offload:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=arguments.model == "tiny")
    return pipe


def generate(pipe: LTX2Pipeline, arguments: argparse.Namespace, steps: int):
    """One clip, and the seconds that it took. Frames are float arrays [F, H, W, 3], sound is a tensor [2, samples]."""
    options = dict(
        prompt=arguments.prompt,
        height=arguments.height,
        width=arguments.width,
        num_frames=arguments.frames,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(arguments.seed),
        output_type="np",
    )
    if arguments.model == "tiny":  # its two layers have no block 28, the one that guidance perturbs by default
        options = models.TINY_CALL | options
    start = time.perf_counter()
    clip = pipe(**options)
    sound = clip.audio[0].float().cpu()  # waits for the GPU
    return clip.frames[0], sound, time.perf_counter() - start


def warm_up_and_generate(pipe: LTX2Pipeline, arguments: argparse.Namespace):
    generate(pipe, arguments, steps=2)  # pays for loading, compiling and, on the fast path, verifying
    return generate(pipe, arguments, arguments.steps)


def contact_sheet(frames, columns: int = 5) -> Image.Image:
    """Up to ten frames, evenly spaced in time, in rows of five."""
    count = min(len(frames), 2 * columns)
    height, width = frames.shape[1:3]
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height))
    for place in range(count):
        frame = frames[place * (len(frames) - 1) // max(count - 1, 1)]
        picture = Image.fromarray((frame * 255).round().astype("uint8"))
        sheet.paste(picture, (place % columns * width, place // columns * height))
    return sheet


def main() -> int:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    pipe = load_pipeline(arguments, device)
    layers = len(pipe.transformer.transformer_blocks)
    print(f"Model: {arguments.model}, {layers} layers, {pipe.transformer.dtype}, on {where}.")
    print(f"Clip: {arguments.frames} frames of {arguments.width} x {arguments.height}, {arguments.steps} steps.")

    stock_frames, stock_sound, stock_seconds = warm_up_and_generate(pipe, arguments)
    handle = ltx2_fastpath.enable(pipe)
    fast_frames, fast_sound, fast_seconds = warm_up_and_generate(pipe, arguments)
    report = str(ltx2_fastpath.report(pipe))
    ltx2_fastpath.disable(pipe)

    same_video = stock_frames.tobytes() == fast_frames.tobytes()
    same_sound = stock_sound.numpy().tobytes() == fast_sound.numpy().tobytes()
    same = same_video and same_sound
    print(f"Video: {stock_frames.size:,} values, {'the same bits' if same_video else 'DIFFERENT'} in both runs.")
    print(f"Sound: {stock_sound.numel():,} samples, {'the same bits' if same_sound else 'DIFFERENT'} in both runs.")
    print(f"Stock diffusers took {stock_seconds:.2f} s.")
    if not handle.active:
        print(f"ltx2_fastpath changed nothing here: {handle.reason}.")
        print(f"So the second run was stock diffusers again, on {where}; it took {fast_seconds:.2f} s.")
    elif same:
        print(f"With ltx2_fastpath it took {fast_seconds:.2f} s: {stock_seconds / fast_seconds:.2f} times as fast.")
    print(report)

    arguments.out.mkdir(parents=True, exist_ok=True)
    encode_video(
        fast_frames,
        fps=int(models.FRAME_RATE),
        output_path=str(arguments.out / "clip.mp4"),
        audio=fast_sound,
        audio_sample_rate=pipe.vocoder.config.output_sampling_rate,
    )
    contact_sheet(fast_frames).save(arguments.out / "frames.png")
    (arguments.out / "report.txt").write_text(report + "\n")
    print(f"Written to {arguments.out}: clip.mp4 (video and sound), frames.png (contact sheet), report.txt.")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
