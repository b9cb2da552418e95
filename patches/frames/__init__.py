"""Frames for people (`VideoProcessor.postprocess_video`): what pipelines make of decoded pixels at last."""
