"""What we know of diffusers' video processor: its sources, and the method that is replaced."""

from diffusers import image_processor, video_processor

# First 16 digits of sha256 over the source. diffusers 0.38.0 to 0.42.1.
KNOWN = {
    "VideoProcessor.postprocess_video": {"e6d363513e3ecce5"},
    "VaeImageProcessor.postprocess": {"2d2bc5d91fdc344f"},
    "VaeImageProcessor._denormalize_conditionally": {"99e2de6c3ca6e301"},
    "VaeImageProcessor.denormalize": {"254e68e7e5b79831"},
    "VaeImageProcessor.pt_to_numpy": {"315d31184f8fe84b"},
    "VaeImageProcessor.numpy_to_pil": {"1a373146885883ca"},
}


def methods() -> dict:
    """The methods whose arithmetic we take over, by the names in `KNOWN`.

    Raises:
        AttributeError: one of them is not there.
    """
    images = image_processor.VaeImageProcessor
    return {
        "VideoProcessor.postprocess_video": video_processor.VideoProcessor.postprocess_video,
        "VaeImageProcessor.postprocess": images.postprocess,
        "VaeImageProcessor._denormalize_conditionally": images._denormalize_conditionally,
        "VaeImageProcessor.denormalize": images.denormalize,
        "VaeImageProcessor.pt_to_numpy": images.pt_to_numpy,
        "VaeImageProcessor.numpy_to_pil": images.numpy_to_pil,
    }
