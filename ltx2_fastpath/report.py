"""What `report` returns: the state of every site, as text and as a table in notebooks."""

import html


class Report:
    """A snapshot of one transformer's fast path. Print it, or let a notebook render it.

    Attributes:
        status: one sentence: active, or why not.
        rows: one dict per site that was reached: site, fast (calls), stock (calls), notes.
        stock_calls: {(place, reason): calls} in which a patched forward took the stock path.
        skipped: {module: reason} of modules that could not be patched.
    """

    def __init__(self, fast):
        self.rows, self.stock_calls, self.skipped = [], {}, {}
        if fast is None:
            self.status = "not enabled"
            return
        self.status = f"active ({fast.tier})" if fast.active else f"off: {fast.reason or 'switched off by disable()'}"
        self.stock_calls = dict(fast.stock_calls)
        self.skipped = dict(fast.skipped)
        for site in fast.sites.values():
            if site.fast or site.stock:
                self.rows.append({"site": site.site, "fast": site.fast, "stock": site.stock, "notes": site.notes})

    def __str__(self) -> str:
        lines = [f"ltx2_fastpath: {self.status}"]
        if self.rows:
            width = max(len(row["site"]) for row in self.rows)
            lines.append(f"  {'site':<{width}}  {'fast':>8}  {'stock':>6}  how")
            for row in self.rows:
                how = "; ".join(row["notes"])
                lines.append(f"  {row['site']:<{width}}  {row['fast']:>8}  {row['stock']:>6}  {how}")
        for (place, reason), calls in sorted(self.stock_calls.items()):
            lines.append(f"  {place}: {calls} calls took the stock path: {reason}")
        for module, reason in self.skipped.items():
            lines.append(f"  {module}: left alone: {reason}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cells(values, tag="td"):
            return "<tr>" + "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values) + "</tr>"

        body = [cells(("site", "fast", "stock", "how"), "th")]
        body += [cells((row["site"], row["fast"], row["stock"], "; ".join(row["notes"]))) for row in self.rows]
        notes = [f"{place}: {calls} calls took the stock path: {reason}" for (place, reason), calls in self.stock_calls.items()]
        notes += [f"{module}: left alone: {reason}" for module, reason in self.skipped.items()]
        listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        table = f"<table>{''.join(body)}</table>" if self.rows else ""
        return f"<p><b>ltx2_fastpath</b>: {html.escape(self.status)}</p>{table}<ul>{listed}</ul>"
