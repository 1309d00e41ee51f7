"""records/other/nanogpt/race.py: its page."""

import json

from records.other.nanogpt import race


def test_the_page_is_that_of_the_log():
    readme = (race.HERE / "README.md").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in race.LOG.read_text(encoding="utf-8").splitlines()]
    assert f"race: begin -->\n{race.page(entries)}<!-- race: end" in readme
