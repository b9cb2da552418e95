"""The transformer's forward: guidance prefix reuse.

LTX-2.3's default call makes three forwards a step. The STG pass (spatio-temporal guidance) differs from the positive row of the
CFG pass from its first perturbed block on, and only there. So the hidden states that enter that block in the CFG pass are kept,
and an STG pass whose inputs are, by value, those of one row of the CFG pass starts at that block.

It is off until a request has shown that it makes STG passes, and until the prefix was run both ways at these shapes and gave the
same bits: that takes two steps of the first call. It is off, too, wherever something watches the blocks that would be skipped.
Where LTX2Pipeline draws the latents itself, the two passes have other bits in stock (high.py says why), and lossless reuses
nothing. Given latents lie alike in memory for both, and so do those of LTX2ConditionPipeline and LTX2InContextPipeline.
"""

import copy
import functools
import inspect
import threading
import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ltx2_fastpath.first_sight import bits

from . import high
from .host import transformer_ltx2
from .survey import Survey

# Arguments that only tell what is perturbed, or how the result is wrapped.
_IGNORED = {"spatio_temporal_guidance_blocks", "perturbation_mask", "return_dict"}


def make_forward(fast):
    """The replacement forward of the transformer."""
    stock = transformer_ltx2.LTX2VideoTransformer3DModel.forward
    signature = inspect.signature(stock)
    names = list(signature.parameters)[1:]  # without self
    prefix = fast.sites["guidance.prefix"]
    graphs = fast.sites["cuda_graphs"]

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
        if changes := high.changes(fast, arguments):
            arguments |= changes
            args = tuple(changes.get(name, value) for name, value in zip(names, args))
            kwargs = kwargs | {name: value for name, value in changes.items() if name not in names[: len(args)]}
        if fast.cuda_graphs and fast.why_not(arguments["hidden_states"]) is None:
            survey = prefix.survey(self)
            reason = _why_watched(fast, self, survey)
            if reason is None:
                return graphs.forward(fast, self, survey, arguments, functools.partial(stock, self))
            graphs.refuse(reason)
        with prefix.passing(fast, self, arguments) as this:
            result = stock(self, *args, **kwargs)
        if this is not None and this.was_cut_short():
            return stock(self, *args, **kwargs)
        return result

    return forward


class _Pass:
    """One forward on its way through the blocks; `at_block` is called by every block, in turn."""

    skips = False  # whether the blocks before `at` need not run

    def __init__(self, at: int):
        self.at = at
        self.next = 0

    def at_block(self, video, audio):
        """(whether to skip this block, its video input, its audio input)"""
        index = self.next
        self.next += 1
        if index == self.at:
            video, audio = self.arrive(video, audio)
        return self.skips and index < self.at, video, audio

    def was_cut_short(self) -> bool:
        """Whether blocks were skipped and block `at` was the host's: another thread called `disable` on the way."""
        return self.skips and 0 < self.next <= self.at

    def arrive(self, video, audio):
        """Called at block `at` with what enters it; returns what shall enter it."""
        raise NotImplementedError


class _Keep(_Pass):
    """A pass whose states may serve a later one: keeps what enters block `at`.

    Of its arguments it keeps copies (34 MB at 14,080 tokens), because callers may change theirs in place between two passes.
    """

    def __init__(self, at, arguments, state):
        super().__init__(at)
        self.arguments = {
            name: _copied(value) if isinstance(value, torch.Tensor) else copy.copy(value) for name, value in arguments.items()
        }
        self.state = state
        self.video = self.audio = None

    def arrive(self, video, audio):
        self.video, self.audio = video, audio
        return video, audio


class _Check(_Pass):
    """An STG pass that runs in full and is compared, at block `at`, with the kept rows it would have started from."""

    def __init__(self, at, video, audio, verdict):
        super().__init__(at)
        self.kept = video, audio
        self.verdict = verdict

    def arrive(self, video, audio):
        self.verdict(torch.equal(video, self.kept[0]) and torch.equal(audio, self.kept[1]))
        return video, audio


class _Reuse(_Pass):
    """An STG pass that starts at block `at` with the kept rows."""

    skips = True

    def __init__(self, at, video, audio):
        super().__init__(at)
        self.kept = video, audio

    def arrive(self, video, audio):
        return self.kept


class _Current(threading.local):
    """A thread's own: other threads run other requests, between whose passes theirs come, and may do so on other streams."""

    value: Any = None  # the pass that it is in
    at: int | None = None  # the first perturbed block of the STG passes seen
    before: tuple = ()  # the layout of the last pass without perturbation, which is that of `kept`
    kept: Any = None  # a _Keep that has arrived, or None


class PrefixReuse:
    """What is kept between the passes of a step, and which shapes were verified.

    Attributes:
        site: its name in reports; fast: STG passes that started at the first perturbed block; stock: those that ran in full;
        notes: why, or how it was verified.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self._notes: set[str] = set()
        self._settings: list = []  # with which the following was found
        # (perturbed block, layout of a pass, layout of the STG pass after it): those that gave other bits, and, with the chunk of
        # rows, those that gave the same.
        self._other_bits: set[tuple] = set()
        self._verified: set[tuple] = set()
        self._current = _Current()
        # A survey holds the weights, which must not outlive the transformer because somebody holds its handle.
        self._surveys: weakref.WeakKeyDictionary[torch.nn.Module, Survey] = weakref.WeakKeyDictionary()

    def survey(self, transformer) -> Survey:
        """The modules and tensors of `transformer` as they are now."""
        survey = self._surveys.get(transformer)
        if survey is None or not survey.holds(transformer):
            survey = self._surveys[transformer] = Survey(transformer)
            self._settings = []
        return survey

    @property
    def notes(self) -> list[str]:
        return sorted(self._notes)

    def current(self):
        """The pass that this thread is in, or None."""
        return self._current.value

    def passing(self, fast, transformer, arguments):
        """A context for one forward: decides what its blocks do and remembers what it leaves."""
        return _Passing(self, self._plan(fast, transformer, arguments))

    def _plan(self, fast, transformer, arguments):
        stg_blocks, mine = arguments.get("spatio_temporal_guidance_blocks"), self._current
        if arguments.get("isolate_modalities") or fast.why_not(arguments["hidden_states"]) is not None:
            return None
        layout = _layout(arguments)
        if not stg_blocks:
            mine.before = layout
            if mine.at is None:
                return None
        elif (min(stg_blocks), mine.before, layout) in self._other_bits:
            mine.at = mine.kept = None
            self.stock += 1
            return None
        survey = self.survey(transformer)
        reason = _why_watched(fast, transformer, survey) or survey.why_unforeseen()
        if reason is not None:
            mine.kept = None
            if stg_blocks:
                self.stock += 1
                self._notes.add(reason)
            return None
        state = survey.state()
        if state.settings != self._settings:  # other kernels may sum in another order
            self._settings = state.settings
            self._other_bits.clear()
            self._verified.clear()
        if not stg_blocks:
            return self._plan_keep(state, arguments)
        return self._plan_stg(state, arguments, layout, min(stg_blocks))

    def _plan_keep(self, state, arguments):
        mine = self._current
        if mine.kept is not None:  # in vain: there are no STG passes any more
            mine.at = mine.kept = None
            return None
        return _Keep(mine.at, arguments, state)

    def _plan_stg(self, state, arguments, layout, at):
        mine = self._current
        kept, mine.kept = mine.kept, None
        if at != mine.at:
            mine.at, kept = at, None
        if kept is None or at == 0:
            self.stock += 1
            return None
        chunk = None if kept.state != state else _equal_chunk(kept.arguments, arguments)
        if chunk is None:
            self.stock += 1
            self._notes.add("the inputs or the weights were not those of a row of the pass before")
            return None
        rows = arguments["hidden_states"].shape[0]
        video, audio = (states[chunk * rows : (chunk + 1) * rows] for states in (kept.video, kept.audio))
        layouts = at, mine.before, layout
        if (*layouts, chunk) in self._verified:
            self.fast += 1
            return _Reuse(at, video, audio)
        self.stock += 1

        def verdict(equal):
            if equal:
                if _is_constant(arguments["hidden_states"]) or _is_constant(arguments["audio_hidden_states"]):
                    return  # which shows nothing: every order of a sum of zeros gives the same bits
                self._verified.add((*layouts, chunk))
                how = "bit-equal both ways"
            else:
                self._other_bits.add(layouts)
                how = "not bit-equal, so not reused"
                if kept.arguments["hidden_states"].is_contiguous() != arguments["hidden_states"].is_contiguous():
                    how += ' (in stock, too: the latents are laid out differently in memory; quality "high" lays them out alike)'
            self._notes.add(f"blocks 0 to {at - 1} at {list(kept.video.shape)}: {how}")

        return _Check(at, video, audio, verdict)


class _Passing:
    """The context of one forward: its `plan` is what the blocks ask, and what it kept is there for the pass after it."""

    def __init__(self, prefix, plan):
        self.prefix = prefix
        self.plan = plan

    def __enter__(self):
        self.outer = self.prefix._current.value
        self.prefix._current.value = self.plan
        return self.plan

    def __exit__(self, error_type, error, traceback):
        self.prefix._current.value = self.outer
        if isinstance(self.plan, _Keep) and self.plan.video is not None and error_type is None:
            self.prefix._current.kept = self.plan


def _equal_chunk(kept: dict, arguments: dict) -> int | None:
    """Which rows of the kept pass had, by value, the inputs of this one: chunk j is rows [j·b, (j+1)·b). One synchronisation."""
    rows = arguments["hidden_states"].shape[0]
    kept_rows = kept["hidden_states"].shape[0]
    if not rows or kept_rows % rows or kept.keys() != arguments.keys():
        return None
    flags = []
    for name in arguments.keys() - _IGNORED:
        before, now = kept[name], arguments[name]
        if not isinstance(now, torch.Tensor):
            if not _same_value(before, now):
                return None
            continue
        if not isinstance(before, torch.Tensor) or before.dtype != now.dtype or before.device != now.device:
            return None
        if before.shape[:1] != (kept_rows,) or now.shape != (rows, *before.shape[1:]):
            return None
        if before.stride(0) == 0:  # all rows are one
            before = before[:rows]
        chunks = bits(before).unflatten(0, (-1, rows)) == bits(now)
        equal = chunks.flatten(1).all(1).expand(kept_rows // rows)
        flags.append(equal.to(arguments["hidden_states"].device))
    equal = torch.stack(flags).all(0).tolist()
    # The positive prompt comes last.
    return next((chunk for chunk in reversed(range(len(equal))) if equal[chunk]), None)


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x`, which keeps rows that are one in memory (a mask of all tokens with all can have a gigabyte) one."""
    return x[:1].clone().expand_as(x) if x.ndim and len(x) > 1 and x.stride(0) == 0 else x.clone()


def _is_constant(x: torch.Tensor) -> bool:
    return bool((x == x.flatten()[:1]).all())


def _same_value(a, b) -> bool:
    try:
        return a is b or bool(a == b)
    except RuntimeError:  # tensors inside; they are not looked into
        return False


def _layout(arguments: dict) -> tuple:
    """Of every tensor in the arguments what a kernel may be chosen by."""
    tensors = ((name, value) for name, value in sorted(arguments.items()) if isinstance(value, torch.Tensor))
    return tuple((name, value.shape, value.stride(), value.dtype) for name, value in tensors)


def _why_watched(fast, transformer, survey) -> str | None:
    """Why blocks must not be skipped: something may be watching them."""
    if fast.is_compiled():
        return "the blocks are compiled"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "global module hooks are set"
    if reason := survey.why_watched():
        return reason
    if not fast.covers_all_blocks:
        return "not all blocks are patched"
    if transformer.training:
        return "the transformer is in training mode"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None
