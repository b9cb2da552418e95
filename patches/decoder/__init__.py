"""LTX-2.5's diffusion video decoder (`LTX2VideoDiffusionDecoderModel`)."""
