"""FirstSight: one verified comparison per signature, or the eager chain for good."""

import itertools
import logging
import weakref
from typing import NamedTuple

import torch

logger = logging.getLogger("ltx2_fastpath")


class Verdict(NamedTuple):
    """What a site does with one signature: launch `candidate`, or (fast=False) compute the eager chain."""

    fast: bool
    candidate: object
    note: str
    shape: str  # of the first tensor among the arguments


_VERDICTS = 1024  # signatures that one site knows; a server that makes every size once a day needs a few hundred


def same_bits(a, b) -> bool:
    """Whether two results (tensors, or nested tuples and lists of them) hold the same bits; any NaN equals any NaN."""
    if not isinstance(a, torch.Tensor):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def same_layout(a, b) -> bool:
    """Whether two results of the same shapes lie alike in memory: what comes after them may be computed by another kernel."""
    if not isinstance(a, torch.Tensor):
        return all(map(same_layout, a, b))
    return all(size < 2 or mine == theirs for size, mine, theirs in zip(a.shape, a.stride(), b.stride()))


def remember(store: dict, key, value, most: int) -> None:
    """Put `value` into `store`, which forgets what it has known for longest where it would hold more than `most`."""
    while len(store) >= most and key not in store:
        store.pop(next(iter(store), None), None)  # another thread may have been here
    store[key] = value


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph, so that nothing may be looked at on the host."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` as integers where it is floating point, so that ``==`` tells 0.0 from -0.0."""
    if not x.is_floating_point():
        return x
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# Custom ops take no Python objects, so compiled graphs name sites by number. Numbers that have become free are given again: a
# graph is looked up in Inductor's caches with the number in it, and one that always grew would never be found. That another
# transformer's site may answer to a number is no harm, if its op is the same: every site verifies for itself.
_by_number: "weakref.WeakValueDictionary[int, FirstSight]" = weakref.WeakValueDictionary()


def numbered(number: int) -> "FirstSight | None":
    """The site that has `number` now, if any: of the transformer for which a graph was made, or of a later one."""
    return _by_number.get(number)


class FirstSight:
    """One site of the model: runs an op's kernel where that was seen to equal the eager chain, else the eager chain.

    Args:
        site: the place's name, for reports and warnings.
        op: a module of `ltx2_fastpath.ops`: `signature`, `refusal`, `CANDIDATES`, `rehearsals`, `launch`, `eager`.
        warned: complaints already made, shared by the sites of one transformer so that one cause is told once.

    Attributes:
        fast: calls answered by the kernel. stock: calls answered by the eager chain, `first` of them because they were the first
        of their signature. left_out: the user wants the eager chain.

    Calling the site with the op's arguments returns the op's result. The first call of each signature runs the kernel on
    the op's rehearsals and then on the live arguments, beside the eager chain, and keeps the first candidate whose bits
    agree. No candidate, a refusal or a failing launch: the eager chain for that signature from then on. Not to be traced.
    """

    def __init__(self, site: str, op, warned: set | None = None):
        self.site = site
        self.op = op
        self.verdicts: dict[object, Verdict] = {}
        self.fast = 0
        self.stock = 0
        self.first = 0
        self.left_out = False
        self._warned = set() if warned is None else warned
        self.number = next(number for number in itertools.count() if number not in _by_number)
        _by_number[self.number] = self

    @property
    def notes(self) -> list[str]:
        """How each signature was verified, or why it fell back, with the shapes that this is about."""
        shapes: dict[str, list[str]] = {}
        for verdict in list(self.verdicts.values()):
            listed = shapes.setdefault(verdict.note, [])
            if verdict.shape not in listed:
                listed.append(verdict.shape)
        return sorted(f"{note} at {_listed(found)}" for note, found in shapes.items())

    def __call__(self, *args):
        if self.left_out:
            self.stock += 1
            return self.op.eager(*args)
        signature = self.op.signature(*args)
        verdict = self.verdicts.get(signature)
        if verdict is None:
            return self._first(signature, args)
        if verdict.fast:
            try:
                result = self.op.launch(verdict.candidate, *args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.verdicts[signature] = verdict._replace(fast=False, note=self._complain(f"its launch failed ({told(error)})"))
            else:
                self.fast += 1
                return result
        self.stock += 1
        return self.op.eager(*args)

    def _first(self, signature, args):
        if is_capturing():
            self.stock += 1
            return self.op.eager(*args)  # a comparison would need the host; this signature is judged at its next call
        expected = self.op.eager(*args)
        remember(self.verdicts, signature, self._judge(args, expected), _VERDICTS)
        self.stock += 1
        self.first += 1
        return expected

    def _judge(self, args, expected) -> Verdict:
        shape = _shape_of(args)
        if reason := self.op.refusal(*args):
            return Verdict(False, None, reason, shape)
        failures = []
        for candidate in self.op.CANDIDATES:
            try:
                rehearsed = 0
                agreed = True
                for trial in self.op.rehearsals(*args):
                    rehearsed += 1
                    agreed = agreed and same_bits(self.op.launch(candidate, *trial), self.op.eager(*trial))
                result = self.op.launch(candidate, *args) if agreed else None
                agreed = agreed and same_bits(result, expected)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failures.append(f"{_named(candidate)} failed ({told(error)})")
                continue
            if agreed and not same_layout(result, expected):
                failures.append(f"{_named(candidate)} lays its result out otherwise than the eager chain")
                continue
            if agreed:
                how = "bit-equal on the live input" + (" and in rehearsal" if rehearsed else "")
                return Verdict(True, candidate, how if candidate is None else f"{candidate}: {how}", shape)
            failures.append(f"{_named(candidate)} gave other bits than the eager chain")
        return Verdict(False, None, self._complain("; ".join(failures)), shape)

    def _complain(self, cause: str) -> str:
        # Triton names a folder for each kernel, so a cache that cannot be written is told in other words by every op.
        told = _UNWRITABLE if _is_unwritable(cause) else cause
        if told not in self._warned:
            self._warned.add(told)
            logger.warning(
                "The fast path at %s is off: %s. The stock computation runs there instead; results are not affected. %s",
                self.site,
                cause,
                advice(cause) or "`python -m ltx2_fastpath` says what to do.",
            )
        return cause


def _shape_of(args) -> str:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return f"{list(arg.shape)}"
        if isinstance(arg, (tuple, list)) and (inside := _shape_of(arg)):
            return inside
    return ""


def _listed(shapes: list[str], most: int = 3) -> str:
    more = f" and {len(shapes) - most} more" if len(shapes) > most else ""
    return ", ".join(shapes[:most]) + more


def told(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _named(candidate) -> str:
    return "its kernel" if candidate is None else f"its kernel {candidate!r}"


_UNWRITABLE = ("Read-only file system", "PermissionError", "NotADirectoryError", "No space left on device", "Disk quota exceeded")


def _is_unwritable(cause: str) -> bool:
    return any(words in cause for words in _UNWRITABLE)


def advice(cause: str) -> str | None:
    """What to do about what made a launch fail, as far as we know."""
    return "Set TRITON_CACHE_DIR to a writable folder." if _is_unwritable(cause) else None
