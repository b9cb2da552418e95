"""The setups that people have on smaller cards: one transformer set up as they do it, stock and fast taking turns."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import ltx2_fastpath
from ltx2_fastpath.testing import models
from ltx2_fastpath.testing.models import Clip

from . import forward

#: What is timed in each setup: a guided step that is given its latents, and one row without guidance.
PASSES: tuple[dict[str, int], ...] = (forward.STEP_PASSES, {"cfg": 1})
_PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0"]


class Setup(NamedTuple):
    """A way to fit the model: what it calls on a transformer in bf16, and the package that it takes beside the usual ones."""

    apply: Callable[[torch.nn.Module], object]
    package: str | None = None


def _cast(transformer):
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def _group_offload(**options):
    return lambda transformer: transformer.enable_group_offload(onload_device=transformer.device, **options)


def _sequential_offload(transformer):
    import accelerate

    accelerate.cpu_offload(transformer, transformer.device, offload_buffers=len(transformer._parameters) > 0)


def _lora(*ranks: int):
    def apply(transformer):
        from peft import LoraConfig

        names = [f"rank_{rank}_{i}" for i, rank in enumerate(ranks)]
        for name, rank in zip(names, ranks):
            config = LoraConfig(r=rank, lora_alpha=rank, target_modules=_PROJECTIONS, init_lora_weights=False)
            transformer.add_adapter(config, adapter_name=name)
        transformer.set_adapter(names)
        transformer.requires_grad_(False)

    return apply


def _torchao(config: Callable):
    def apply(transformer):
        from torchao import quantization

        quantization.quantize_(transformer.transformer_blocks, config(quantization))

    return apply


def _linears(transformer):
    """(parent, name, layer) of every linear layer in the blocks."""
    for module in list(transformer.transformer_blocks.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is torch.nn.Linear:
                yield module, name, layer


def _nf4(transformer):
    import bitsandbytes

    for module, name, layer in _linears(transformer):
        new = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, torch.bfloat16, quant_type="nf4", device="meta"
        )
        new.weight = bitsandbytes.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
        new.bias = layer.bias
        setattr(module, name, new.to(layer.weight.device))


def _int8(transformer):
    import bitsandbytes

    for module, name, layer in _linears(transformer):
        new = bitsandbytes.nn.Linear8bitLt(
            layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False, threshold=6.0, device="meta"
        )
        new.weight = bitsandbytes.nn.Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
        new.bias = layer.bias
        setattr(module, name, new.to(layer.weight.device))


def _gguf(kind: str):
    """Layers of the GGUF type `kind` with random codes and one small scale: what they cost does not depend on their values."""

    def apply(transformer):
        import gguf
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        quant_type = getattr(gguf.GGMLQuantizationType, kind)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
        for module, name, layer in _linears(transformer):
            rows, columns = layer.weight.shape
            shape, device = (rows, columns // block_size, block_bytes), layer.weight.device
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            codes[..., :2] = torch.tensor([1e-4], dtype=torch.float16, device=device).view(torch.uint8)  # Q8_0's and Q4_K's scale
            if kind == "Q4_K":
                codes[..., 2:4] = codes[..., :2]  # of the minima
            new = GGUFLinear(columns, rows, layer.bias is not None, compute_dtype=torch.bfloat16, device="meta")
            new.weight = GGUFParameter(codes.flatten(1), quant_type=quant_type)
            new.bias = layer.bias
            setattr(module, name, new)

    return apply


def _in_turn(*setups: Callable):
    def apply(transformer):
        for setup in setups:
            setup(transformer)

    return apply


_BLOCKS = dict(offload_type="block_level", num_blocks_per_group=1)
_LEAVES = dict(offload_type="leaf_level")
SETUPS = {
    "bf16": Setup(lambda transformer: None),
    "fp8 casting": Setup(_cast),
    "group offload, leaves, stream": Setup(_group_offload(**_LEAVES, use_stream=True)),
    "group offload, blocks, stream": Setup(_group_offload(**_BLOCKS, use_stream=True)),
    "group offload, leaves": Setup(_group_offload(**_LEAVES)),
    "group offload, blocks": Setup(_group_offload(**_BLOCKS)),
    "sequential offload": Setup(_sequential_offload),
    "LoRA, rank 32": Setup(_lora(32), "peft"),
    "LoRA, rank 384": Setup(_lora(384), "peft"),
    "two LoRAs, rank 32": Setup(_lora(32, 32), "peft"),
    "torchao float8, rows": Setup(
        _torchao(lambda q: q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerRow())), "torchao"
    ),
    "torchao float8, tensor": Setup(
        _torchao(lambda q: q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerTensor())), "torchao"
    ),
    "torchao int8 weights": Setup(_torchao(lambda q: q.Int8WeightOnlyConfig()), "torchao"),
    "torchao int8 dynamic": Setup(_torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig()), "torchao"),
    "bitsandbytes nf4": Setup(_nf4, "bitsandbytes"),
    "bitsandbytes int8": Setup(_int8, "bitsandbytes"),
    "GGUF Q8_0": Setup(_gguf("Q8_0"), "gguf"),
    "GGUF Q4_K": Setup(_gguf("Q4_K"), "gguf"),
    "LoRA, casting and leaves": Setup(_in_turn(_lora(32), _cast, _group_offload(**_LEAVES, use_stream=True)), "peft"),
}


class Stock:
    """A transformer that computes the stock way, set up as the fast one is: it is the same one."""

    def __init__(self, transformer):
        self._transformer = transformer
        # Before it is set up: weights may be elsewhere then, and in another dtype.
        self.device, self.dtype = transformer.device, transformer.dtype

    def __getattr__(self, name):
        return getattr(self._transformer, name)

    def __call__(self, **kwargs):
        with ltx2_fastpath.disabled(self._transformer):
            return self._transformer(**kwargs)


@contextlib.contextmanager
def limited(memory_gib: float | None):
    """Within the block this process may allocate so much memory on the GPU."""
    if memory_gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def run(
    section: dict, name: str, clip: Clip, layers: int | None, meter, *, repeats: int, progress: Callable[[str], None]
) -> Iterator[dict]:
    """Build the transformer, set it up as `name` says, and measure it, eager and fast: one section for each of PASSES.

    `section` is what they begin with: its name, version and notes. What cannot be set up here is one section that says why.
    """
    setup = SETUPS[name]
    if setup.package and importlib.util.find_spec(setup.package) is None:
        yield {**section, "setup": name, "equal": True, "arms": {}, "notes": [f"left out: {setup.package} is not installed"]}
        return
    progress(f"{name}: building the transformer")
    options = {} if layers is None else dict(num_layers=layers)
    transformer = models.build_transformer(section["version"], device=_device(), dtype=torch.bfloat16, **options)
    stock = Stock(transformer)
    setup.apply(transformer)
    forward.make_fast(transformer)
    for passes in PASSES:
        measured = {**section, "setup": name, "notes": [*section["notes"]]}
        instances = forward.Instances(stock, transformer, transformer, transformer)
        arms = forward.EAGER, forward.FAST
        forward.measure(measured, instances, clip, passes, arms, meter, given_latents=True, repeats=repeats, progress=progress)
        report = ltx2_fastpath.report(transformer)
        for key, counted in (("stock_calls", report.stock_calls), ("partly", report.partly)):
            told = {f"{place}: {reason}": calls for (place, reason), calls in counted.items()}
            measured[key] = {text: calls for text, calls in told.items() if "disabled()" not in text}
        yield measured
    ltx2_fastpath.disable(transformer)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
