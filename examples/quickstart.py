"""One clip with the fast path.

python examples/quickstart.py diffusers/LTX-2.3-Diffusers    real weights, on a GPU
python examples/quickstart.py tiny                           two random layers, anywhere
"""

import sys

import torch
from diffusers import LTX2Pipeline
from diffusers.utils import encode_video

import ltx2_fastpath


def main(model: str, out: str = "quickstart.mp4") -> None:
    if model == "tiny":
        from ltx2_fastpath.testing import models

        pipe, options = models.tiny_pipeline("2.3"), models.TINY_CALL
    else:
        pipe = LTX2Pipeline.from_pretrained(model, torch_dtype=torch.bfloat16)
        options = dict(prompt="A lighthouse in a storm at dusk; waves crash, gulls cry.", height=512, width=768, num_frames=121)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")

    ltx2_fastpath.enable(pipe)
    clip = pipe(**options, generator=torch.Generator().manual_seed(0), output_type="np")

    sound = clip.audio[0].float().cpu()
    encode_video(clip.frames[0], fps=24, output_path=out, audio=sound, audio_sample_rate=pipe.vocoder.config.output_sampling_rate)
    print(ltx2_fastpath.report(pipe))
    print(f"Written: {out}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
