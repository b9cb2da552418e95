"""The LTX-2 transformer (`LTX2VideoTransformer3DModel`): LTX-2, LTX-2.3 and LTX-2.5."""
