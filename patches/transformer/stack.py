"""The transformer as a whole: what forwards ask that reach beyond one block."""

import weakref

import torch
from torch.nn.modules import module as torch_module

from ltx2_fastpath.first_sight import is_capturing

from ..handle import FastPath
from . import host
from .survey import Survey


class Stack:
    """The blocks of one transformer, and the only owner of surveys of its modules."""

    def __init__(self, handle: FastPath, transformer: torch.nn.Module):
        self._handle = handle
        self._transformer = weakref.ref(transformer)
        # A survey holds the weights, which must not outlive the transformer because somebody holds its handle.
        self._surveys: weakref.WeakKeyDictionary[torch.nn.Module, Survey] = weakref.WeakKeyDictionary()

    def _blocks(self):
        """The blocks; none where a deep copy has outlived the transformer."""
        transformer = self._transformer()
        return () if transformer is None else getattr(transformer, host.BLOCKS)

    def is_compiled(self) -> bool:
        """Whether the blocks were compiled one by one (`compile_repeated_blocks`)."""
        return any(block._compiled_call_impl is not None for block in self._blocks())

    def _patches(self) -> list:
        """The patch of each block, or None where it has none."""
        return [self._handle.patches.get(f"{host.BLOCKS}.{i}") for i in range(len(self._blocks()))]

    def covers_all_blocks(self) -> bool:
        """Whether every block calls our forward and nothing else, so that a block can be handed what only ours understands."""
        patches = self._patches()
        return bool(patches) and all(patch and patch.is_called(block) for patch, block in zip(patches, self._blocks()))

    def takes_rows(self) -> bool:
        """Whether every block understands `IndexedRows`, and no hook reads what the blocks are given."""
        hooked = any(block._forward_hooks or block._forward_pre_hooks for block in self._blocks())
        return self.covers_all_blocks() and not self.is_compiled() and not hooked

    def survey(self, module: torch.nn.Module) -> Survey:
        """The modules and tensors of `module`, the transformer or a part of it, as they are now."""
        survey = self._surveys.get(module)
        if survey is None or not survey.holds(module):
            survey = self._surveys[module] = Survey(module)
        return survey

    def why_watched(self, transformer: torch.nn.Module, survey: Survey) -> str | None:
        """Why blocks must not be skipped, nor forwards replayed: something may be watching them."""
        if self.is_compiled():
            return "the blocks are compiled"
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "global module hooks are set"
        if reason := survey.why_watched():
            return reason
        if not all(patch and patch.is_in_place() for patch in self._patches()):
            return "not all blocks are patched"
        if transformer.training:
            return "the transformer is in training mode"
        if is_capturing():
            return "a CUDA graph is being captured"
        return None
