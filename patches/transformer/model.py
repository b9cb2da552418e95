"""The transformer's own forward: what is decided once for all blocks, then the host's forward around ours of the blocks."""

import functools
import inspect

import torch

from . import high
from .host import transformer_ltx2


def make_forward(parts):
    """The replacement forward of the transformer."""
    stock = transformer_ltx2.LTX2VideoTransformer3DModel.forward
    signature = inspect.signature(stock)
    names = list(signature.parameters)[1:]  # without self
    handle, graphs = parts.handle, parts.graphs

    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return stock(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments.pop("self")
        # The host scales LoRAs by keyword arguments alone, so a call must stay as it was given.
        arguments["attention_kwargs"] = kwargs.get("attention_kwargs")
        with handle.one_forward():
            if changes := high.changes(parts, arguments):
                arguments |= changes
                args = tuple(changes.get(name, value) for name, value in zip(names, args))
                kwargs = kwargs | {name: value for name, value in changes.items() if name not in names[: len(args)]}
            if handle.cuda_graphs and handle.why_not(arguments["hidden_states"]) is None:
                survey = parts.stack.survey(self)
                reason = parts.stack.why_watched(self, survey)
                if reason is None and survey.moves():
                    reason = "hooks put the weights elsewhere in memory in each forward"
                if reason is None:
                    return graphs.forward(parts, self, survey, arguments, functools.partial(stock, self))
                graphs.refuse(reason)
            with parts.guidance.passing(parts, self, arguments):
                return stock(self, *args, **kwargs)

    return forward
