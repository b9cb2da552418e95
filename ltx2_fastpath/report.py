"""What `report` returns: the state of every site, as text and as a table in notebooks."""

import html

from .patches.handle import FastPath


class Report:
    """A snapshot of the fast path of a pipeline's models. Print it, or let a notebook render it.

    Attributes:
        status: one sentence: active, or why not.
        rows: one dict per site that was reached: site, fast (calls by our kernels), first (calls that computed both ways and
            compared), stock (calls), notes.
        stock_calls: {(place, reason): calls} in which a patched forward took the stock path.
        partly: {(place, reason): calls} in which a fast forward went without something that it could have used.
        skipped: {module: reason} of modules that could not be patched.
    """

    def __init__(self, handles: list[FastPath | None]):
        self.rows: list[dict] = []
        self.stock_calls: dict[tuple[str, str], int] = {}
        self.partly: dict[tuple[str, str], int] = {}
        self.skipped: dict[str, str] = {}
        self._layers: dict[tuple[str, str], str] = {}
        enabled = [handle for handle in handles if handle is not None]
        told = [_status(handle) for handle in enabled]
        if len(enabled) > 1 and len(set(told)) > 1:
            told = [f"{handle.component} {status}" for handle, status in zip(enabled, told)]
        self.status = "; ".join(dict.fromkeys(told)) or "not enabled"
        for handle in enabled:
            self._add(handle)

    def _add(self, handle: FastPath) -> None:
        # Copies, because a request may be running in another thread.
        self.stock_calls |= dict(handle.stock_calls)
        self.partly |= dict(handle.partly)
        self.skipped |= dict(handle.skipped)
        for key, layers in dict(handle.layers_of).items():
            if len(listed := sorted(layers)) < handle.layers:
                self._layers[key] = f" (layer{'s' * (len(listed) > 1)} {', '.join(map(str, listed))})"
        for site in handle.sites.values():
            if site.fast or site.first or site.stock:
                notes = ["left out by enable(..., without=...)"] if site.left_out else site.notes
                row = {
                    "site": site.site,
                    "fast": site.fast,
                    "first": site.first,
                    "stock": site.stock - site.first,
                    "notes": notes,
                }
                self.rows.append(row)

    def _remarks(self) -> list[str]:
        """What the report tells beside its table."""
        remarks = [
            f"{place}{self._layers.get((place, reason), '')}: {calls} calls {what}: {reason}"
            for counted, what in ((self.stock_calls, "took the stock path"), (self.partly, "went without it"))
            for (place, reason), calls in sorted(counted.items())
        ]
        return remarks + [f"{module}: left alone: {reason}" for module, reason in self.skipped.items()]

    def __str__(self) -> str:
        lines = [f"ltx2_fastpath: {self.status}"]
        if self.rows:
            width = max(len(row["site"]) for row in self.rows)
            lines.append(f"  {'site':<{width}}  {'fast':>8}  {'first':>6}  {'stock':>6}  how")
            for row in self.rows:
                counts = f"{row['fast']:>8}  {row['first']:>6}  {row['stock']:>6}"
                lines.append(f"  {row['site']:<{width}}  {counts}  {'; '.join(row['notes'])}")
        return "\n".join([*lines, *(f"  {remark}" for remark in self._remarks())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cells(values, tag="td"):
            return "<tr>" + "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values) + "</tr>"

        body = [cells(("site", "fast", "first", "stock", "how"), "th")]
        for row in self.rows:
            body.append(cells((row["site"], row["fast"], row["first"], row["stock"], "; ".join(row["notes"]))))
        listed = "".join(f"<li>{html.escape(remark)}</li>" for remark in self._remarks())
        table = f"<table>{''.join(body)}</table>" if self.rows else ""
        return f"<p><b>ltx2_fastpath</b>: {html.escape(self.status)}</p>{table}<ul>{listed}</ul>"


def _status(handle: FastPath) -> str:
    return f"active ({handle.tier})" if handle.active else f"off: {handle.reason or 'switched off by disable()'}"
