"""The ways in which people set up a pipeline, by real calls of accelerate, diffusers and peft that work on a CPU.

Also what the tests of living together compare: the outputs of a denoising step, and the anatomy of a transformer, which is
everything that hooks and patches leave in its modules.
"""

import collections
import contextlib
import copy
import functools
import types

import accelerate
import torch
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

import ltx2_fastpath
from ltx2_fastpath.testing import models

CPU = torch.device("cpu")
SMALL = dict(height=64, width=96, num_frames=9, text_tokens=16)
ATTENTION_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


class CpuPipeline(LTX2Pipeline):
    """An LTX2Pipeline whose offloads take the CPU for the accelerator, so that the same hooks wrap the same forwards.

    diffusers refuses to offload without an accelerator, and names the device "cpu:0", for which accelerate 1.15 turns parameters
    into plain tensors. The calls below are those that diffusers makes, with the device spelled "cpu".
    """

    def enable_sequential_cpu_offload(self, gpu_id=None, device=None):
        self._maybe_raise_error_if_group_offload_active(raise_error=True)
        self.remove_all_hooks()
        for component in self.components.values():
            if isinstance(component, torch.nn.Module):
                accelerate.cpu_offload(component, "cpu", offload_buffers=len(component._parameters) > 0)

    def enable_model_cpu_offload(self, gpu_id=None, device=None):
        super().enable_model_cpu_offload(device="cpu")


def tiny(version: str = "2.3", **options) -> LTX2VideoTransformer3DModel:
    """A `models.tiny_transformer` of the caller's own, in a tenth of the time: a copy of one that nobody else gets."""
    return _copied(_original(version, **options))


@functools.lru_cache
def _original(version, **options):
    return models.tiny_transformer(version, **options)


def _copied(module):
    """A deep copy of a fresh module, without asking every object in it how it wants to be copied."""
    twin = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(twin)[name] = value.copy() if type(value) in (dict, collections.OrderedDict, set) else value
    for name, tensor in module._parameters.items():
        twin._parameters[name] = None if tensor is None else torch.nn.Parameter(tensor.data.clone(), requires_grad=False)
    for name, tensor in module._buffers.items():
        twin._buffers[name] = None if tensor is None else tensor.clone()
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _copied(child)
    if "processor" in vars(module):
        twin.processor = copy.copy(module.processor)
    return twin


def pipeline_of(transformer) -> CpuPipeline:
    """A pipeline whose only component is `transformer`: enough to offload, to load adapters, and to remove hooks."""
    names = ("scheduler", "vae", "audio_vae", "text_encoder", "tokenizer", "connectors", "vocoder")
    return CpuPipeline(**dict.fromkeys(names), transformer=transformer)


def step(transformer, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """One denoising step as the pipelines run it: without gradients, in a cache context. -> (video, audio)"""
    kwargs = models.inputs(transformer, **SMALL | options, device="cpu", dtype=dtype_of(transformer))
    return run(transformer, **kwargs)


def run(transformer, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """`transformer(**kwargs)` without gradients, in a cache context."""
    with torch.no_grad(), transformer.cache_context("cond_uncond"):
        return transformer(**kwargs)


def two_rows(kwargs: dict) -> dict:
    """The arguments of the CFG pass beside an STG pass with `kwargs`: two equal rows, concatenated and unperturbed."""
    doubled = {name: torch.cat([value, value]) if torch.is_tensor(value) else value for name, value in kwargs.items()}
    assert doubled["hidden_states"].is_contiguous()
    return doubled | dict(spatio_temporal_guidance_blocks=None)


def dtype_of(transformer) -> torch.dtype:
    """The dtype that activations have: that of a parameter that no layerwise casting reaches."""
    return transformer.transformer_blocks[0].scale_shift_table.dtype


def generate(pipe, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The video and audio latents that a whole tiny pipeline makes."""
    options = models.TINY_CALL | options
    output = pipe(**options, generator=torch.Generator().manual_seed(0), output_type="latent")
    return output.frames, output.audio


def equal(a, b) -> bool:
    """Whether two outputs (video, audio) hold the same bits; any NaN equals any NaN."""
    return len(a) == len(b) and all(map(equal_bits, a, b))


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(0.0, float("inf"), -float("inf")), b.nan_to_num(0.0, float("inf"), -float("inf"))
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def outcome(call):
    """What `call()` returns, or the type and the text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def lora(version="2.3", *, num_layers=2, seed=1, rank=4, targets=ATTENTION_PROJECTIONS, **options) -> dict[str, torch.Tensor]:
    """A LoRA for `pipe.load_lora_weights`, as a file would hold it; every weight random, so that it shows in the outputs."""
    source = tiny(version, num_layers=num_layers)
    source.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), **options))
    generator = torch.Generator().manual_seed(seed)
    return {
        f"transformer.{name}": torch.randn(weight.shape, generator=generator) * 0.2
        for name, weight in get_peft_model_state_dict(source).items()
    }


def pab() -> PyramidAttentionBroadcastConfig:
    """Pyramid attention broadcast that reuses every attention's output in every second step."""
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
    )


def taylorseer(**options) -> TaylorSeerCacheConfig:
    """TaylorSeer that predicts every second step from the second on."""
    options = dict(cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32) | options
    return TaylorSeerCacheConfig(**options)


@contextlib.contextmanager
def attention_backend_of_its_own():
    """`set_attention_backend` also sets the default of the whole process; within this context only."""
    backend = _AttentionBackendRegistry._active_backend
    try:
        yield
    finally:
        _AttentionBackendRegistry.set_active_backend(backend)


def anatomy(transformer) -> dict[str, dict]:
    """What hooks and patches have left in every module: the names in its ``__dict__``, the forwards wherever they are kept,
    its processor, and where its tensors are.

    Two transformers with equal anatomies were set up alike. A plain bound method of the class's own forward in ``__dict__``,
    which removed hooks leave behind, counts as none.
    """
    return {name: _anatomy_of(module) for name, module in transformer.named_modules()}


def _anatomy_of(module) -> dict:
    found = {"class": type(module), "names": set(vars(module)) - {"forward"}}
    for name in ("forward", "_old_forward"):
        found[name] = _chain(vars(module).get(name), module)
    for name, hook in getattr(vars(module).get("_diffusers_hook"), "hooks", {}).items():
        reference = hook.fn_ref
        found[f"hook {name}"] = _chain(reference.forward, module), _chain(reference.original_forward, module)
    processor = vars(module).get("processor")
    if processor is not None:
        found["processor"] = type(processor), processor._attention_backend
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    found["tensors"] = {name: (type(tensor), tensor.dtype, tensor.device) for name, tensor in tensors}
    return found


def _chain(forward, module) -> tuple:
    """What a call of `forward` runs, from the outside in, as far as wrappers tell; the class's own forward is left out."""
    chain = []
    while forward is not None:
        if isinstance(forward, types.MethodType) and forward.__func__ is getattr(type(forward.__self__), "forward", None):
            if forward.__self__ is not module:
                chain.append("a forward of another module")
            break
        function = forward.func if isinstance(forward, functools.partial) else getattr(forward, "__func__", forward)
        chain.append(f"{function.__module__}.{function.__qualname__} in {function.__code__.co_filename.rsplit('/', 2)[-2:]}")
        forward = vars(forward).get("__wrapped__") if isinstance(forward, functools.partial) else None
    return tuple(chain)


def differences(a: dict[str, dict], b: dict[str, dict]) -> list[str]:
    """Where two anatomies differ, for assertion messages; empty if they are equal."""
    return [
        f"{name}: {key}: {a.get(name, {}).get(key)} != {b.get(name, {}).get(key)}"
        for name in sorted(a.keys() | b.keys())
        for key in sorted(a.get(name, {}).keys() | b.get(name, {}).keys())
        if a.get(name, {}).get(key) != b.get(name, {}).get(key)
    ]


class Together:
    """A transformer without us beside its like with us: whatever is done is done to both, and both must give the same bits.

    Args:
        launches: the `stand_ins`.
        make: makes a pipeline; called twice.

    Attributes:
        stock, ours: the two pipelines. Only `enable`, `disable` and what a test does to `ours` alone make a difference.
    """

    def __init__(self, launches, make=lambda: pipeline_of(tiny())):
        self.launches = launches
        self.stock, self.ours = make(), make()

    def do(self, act, *args, **kwargs) -> None:
        """`act(pipe, ...)` to both pipelines; with the name of one of the transformer's methods, that."""
        for pipe in (self.stock, self.ours):
            function = getattr(pipe.transformer, act) if isinstance(act, str) else functools.partial(act, pipe)
            function(*args, **kwargs)

    def check(self, call=None, *, fast=True, **options) -> collections.Counter:
        """Both give the same bits for `call(pipe)` (default: one denoising step); ours by launches if `fast`, or by none.

        Returns the launches by op.
        """
        call = call or (lambda pipe: step(pipe.transformer, **options))
        expected = call(self.stock)
        before = self.launches.copy()
        assert equal(expected, call(self.ours))
        launched = self.launches - before
        assert bool(launched) == fast, launched
        return launched

    def check_restored(self) -> None:
        """Nothing of us is left in ours."""
        assert differences(anatomy(self.stock.transformer), anatomy(self.ours.transformer)) == []


def fast_at(pipe, site: str) -> int:
    """How many calls of a site were answered by its kernel."""
    return sum(row["fast"] for row in ltx2_fastpath.report(pipe).rows if row["site"] == site)
