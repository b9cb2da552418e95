"""`python -m ltx2_fastpath` on a GPU: everything is judged, verifies, and takes less than a minute."""

import json

from ltx2_fastpath import __main__ as cli
from ltx2_fastpath import check


def test_machine_check(capsys):
    status = cli.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    print(check.text(found))
    assert found["layer"]["equal"] is True and found["layer"]["fast"] > 20
    assert len(found["operations"]) == 18
    for row in found["operations"]:
        # Every implementation was tried, and one of its orders verified.
        for implementation in {tried["implementation"] for tried in row["candidates"]}:
            assert any(tried["ok"] for tried in row["candidates"] if tried["implementation"] == implementation), row
    assert found["outcome"]["active"] and status == 0
    assert found["seconds"] < 60
