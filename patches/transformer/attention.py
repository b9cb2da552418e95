"""The attention's forward: what both LTX-2 processors compute, with QK-norm + RoPE and the head gate fused.

The processor object stays where it is and is read at every call, so `set_attn_processor` and `set_attention_backend` work
before and after, and a processor that we do not know gets the stock forward. The stock forward also runs `inspect.signature` in
every call, 288 times a forward; this one does not.
"""

import functools
import threading

import torch

from ltx2_fastpath.ops import head_gate as gate_op
from ltx2_fastpath.ops import qk_norm_split_rope as qk_op

from .host import transformer_ltx2


def make_forward(parts, name):
    """The replacement forward for the attentions called `name` in their blocks."""
    stock = transformer_ltx2.LTX2Attention.forward
    plain_processor = transformer_ltx2.LTX2AudioVideoAttnProcessor
    perturbed_processor = transformer_ltx2.LTX2PerturbedAttnProcessor
    handle = parts.handle
    qk_site = parts.ops[f"{name}.qk_norm_split_rope"]
    rope_site = parts.ops[f"{name}.split_rope"]
    gate_site = parts.ops[f"{name}.head_gate"]

    def fused_norm_and_rotate(attention, query, key, query_rotary_emb, key_rotary_emb):
        norm_q, norm_k = attention.norm_q, attention.norm_k
        if key_rotary_emb is None:
            key_rotary_emb = query_rotary_emb
        if qk_op.is_plain(norm_q, query) and qk_op.is_plain(norm_k, key):
            return qk_site(norm_q, norm_k, query, key, query_rotary_emb, key_rotary_emb)
        handle.count_partly(f"{name}.qk_norm", "norms that are hooked, moved or of another kind are called", attention)
        query, key = norm_q(query), norm_k(key)
        if query_rotary_emb is None:
            return query, key
        return rope_site(None, None, query, key, query_rotary_emb, key_rotary_emb)

    def traced_norm_and_rotate(attention, *args):
        return qk_op.traced(qk_site, attention.norm_q, attention.norm_k, *args)

    # In a compiled graph QK-norm + RoPE is one opaque op, and the rest is left to Inductor.
    fused = _MaskPreparation(), fused_norm_and_rotate, gate_site
    traced = _prepare_mask, traced_norm_and_rotate, gate_op.eager

    @functools.wraps(stock)
    def forward(
        self,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        query_rotary_emb=None,
        key_rotary_emb=None,
        **kwargs,
    ):
        processor = self.processor
        perturbable = type(processor) is perturbed_processor
        tracing = torch.compiler.is_compiling()
        reason = _why_not_traced(handle, self, hidden_states) if tracing else handle.why_not(hidden_states)
        if reason is None and not (perturbable or type(processor) is plain_processor):
            reason = f"the processor is {type(processor).__name__}"
        elif reason is None and query_rotary_emb is not None and self.rope_type != "split":
            reason = f"rope_type is {self.rope_type!r}"
        elif reason is None and not kwargs.keys() <= ({"perturbation_mask", "all_perturbed"} if perturbable else set()):
            reason = "keyword arguments that the processor does not take"
        if reason is not None:
            handle.count_stock(name, reason, self)
            return stock(
                self, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb, key_rotary_emb, **kwargs
            )  # fmt: skip

        prepare_mask, norm_and_rotate, gate_heads = traced if tracing else fused
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if attention_mask is not None:
            attention_mask = prepare_mask(self, attention_mask, source)
        modules = self._modules  # read directly: an attribute of a module costs 0.5 µs, and there are 2,600 in a forward
        gate_logits = None if modules.get("to_gate_logits") is None else modules["to_gate_logits"](hidden_states)

        perturbation_mask = kwargs.get("perturbation_mask")
        all_perturbed = kwargs.get("all_perturbed")
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and torch.all(perturbation_mask == 0)

        if all_perturbed:
            out = modules["to_v"](source)  # spatio-temporal guidance: the values alone
        else:
            # In the order of the stock processors, which offloading prefetches by.
            value = modules["to_v"](source) if perturbable else None
            query, key = modules["to_q"](hidden_states), modules["to_k"](source)
            value = modules["to_v"](source) if value is None else value
            query, key = norm_and_rotate(self, query, key, query_rotary_emb, key_rotary_emb)
            out = transformer_ltx2.dispatch_attention_fn(
                _by_head(query, self.heads),
                _by_head(key, self.heads),
                _by_head(value, self.heads),
                attn_mask=attention_mask,
                dropout_p=0.0,
                is_causal=False,
                backend=processor._attention_backend,
                parallel_config=processor._parallel_config,
            )
            if perturbation_mask is not None:
                out = torch.lerp(value, out.flatten(2, 3).to(query.dtype), perturbation_mask)
            elif gate_logits is None or out.dtype != query.dtype:
                out = out.flatten(2, 3).to(query.dtype)

        if gate_logits is not None:
            out = gate_heads(out if out.ndim == 4 else _by_head(out, self.heads), gate_logits)
        projection, dropout = modules["to_out"]
        return dropout(projection(out))

    return forward


def _why_not_traced(handle, attention, hidden_states):
    """Why a compiled graph holds the host's attention instead of ours."""
    # Not torch.compiler.is_exporting(): of that Dynamo makes True, whatever it traces for (torch 2.11).
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return "torch.export is tracing"  # what it makes is for processes without us
    if not qk_op.traceable(attention.norm_q, attention.norm_k, hidden_states, attention.inner_dim, attention.heads):
        return "norms, widths or hidden states that the kernels do not take"
    return handle.why_not_traced(hidden_states)


def _by_head(x, heads):
    """[B, S, H·d] -> [B, S, H, d]"""
    return x.view(*x.shape[:2], heads, -1)


def _prepare_mask(attention, mask, source):
    """The host's: [B, heads, 1 or S, S_k]"""
    batch, tokens, _ = source.shape
    prepared = attention.prepare_attention_mask(mask, tokens, batch)
    return prepared.view(batch, attention.heads, -1, prepared.shape[-1])


class _MaskPreparation(threading.local):
    """The host's mask preparation, done once for the layers that get the same mask instead of in each.

    Only masks with one row for all queries are kept: a full one, repeated for every head, can be gigabytes. Each thread keeps its
    own, because another thread's may still be on its way on another CUDA stream.
    """

    def __init__(self):
        self._last: tuple = (None, None, None)

    def __call__(self, attention, mask, source):
        key = None if mask.is_inference() else (mask._version, attention.heads, source.shape[:2])
        kept, kept_key, prepared = self._last
        if kept is mask and key is not None and kept_key == key:
            return prepared
        prepared = _prepare_mask(attention, mask, source)
        if prepared.shape[2] == 1:
            self._last = (mask, key, prepared)
        return prepared
